"""Files of trained weights, which `--export` writes at the end of a run.

The weights are converted one layer at a time: a device holds its state and one float32
matrix.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

import tcfp_jax
from tcfp_jax.weights.parameter import Parameter, is_quantized

from ..huggingface.configs import is_folder
from ..huggingface.folders import Form, check_folder, write_folder
from ..huggingface.held import filled
from ..nets.adapters import added, changes_of, has_adapters, layer_of, merged
from ..nets.shapes import LlamaConfig
from .parameters import check_export, export
from .processes import is_first, whole
from .settings import TrainConfig
from .state import PairState, TrainState

BYTES = {"npz": 4.0, "bf16": 2.0, "fp8": 1.0, "nvfp4": 0.5}  # per weight, at least


@dataclass(frozen=True)
class Export:
    """A file or folder of trained weights.

    Attributes:
      path: An `.npz`, which gets float32 (`models.training.parameters.export`), or a
        folder (`models.huggingface.folders.write_folder`).
      form: Form of the weights in a folder.
    """

    path: Path
    form: Form = "bf16"

    @property
    def is_folder(self) -> bool:
        """True if the path names a folder."""
        return self.path.suffix != ".npz"

    @property
    def weight_bytes(self) -> float:
        """Bytes of a weight in the file, at least."""
        return BYTES[self.form if self.is_folder else "npz"]

    def check(self, config: TrainConfig) -> None:
        """Raise `ValueError` if the weights of a run cannot be written there; nothing
        is created.
        """
        if self.is_folder:
            check_folder(self.path, config.size, config.start, config.data.tokenizer)
        else:
            check_export(self.path)

    def write(self, config: TrainConfig, state: TrainState | PairState) -> None:
        """Write the weights of a run; all processes call it, and the first one writes.

        Raises:
          OSError: a file cannot be written, such as on a full disk.
          ValueError: as `check`.
        """
        self.check(config)
        params = floats(state.params, tcfp_jax.layer_state(state.opt_state))
        if jax.process_count() > 1:  # in which all processes take part
            params = jax.tree.map(gathered, params)
        if not self.is_folder:
            export(self.path, params)
            return
        size = config.size
        if not is_first() or not isinstance(size, LlamaConfig):
            return
        source = None
        if config.start is not None and is_folder(config.start):
            source = Path(config.start)
        write_folder(
            self.path,
            params,
            dataclasses.replace(size, lora=0),
            self.form,
            source,
            config.data.tokenizer,
            changes_of(state.params),
        )


@dataclass(frozen=True)
class Trained:
    """A float32 parameter that is computed from a trained weight when it is read: an
    `OnHost` of `tcfp_jax.weights.layerwise`.

    Attributes:
      weight: A stored weight, a frozen one, or floats.
      adapter: The adapter that is added, or None.
      shape: Shape of the parameter.
      stacked: Whether it is a stack of layers.
    """

    weight: Any
    adapter: Any
    shape: tuple[int, ...]
    stacked: bool
    dtype: np.dtype = np.dtype(np.float32)

    @classmethod
    def of(cls, weight: Any, adapter: Any = None) -> Any:
        """Return the parameter of a weight; float32 without an adapter is itself.

        A stack of one frozen layer may be a matrix.
        """
        if adapter is not None and len(weight.shape) < adapter["a"].ndim:
            weight = jax.tree.map(_alone_in_stack, weight)
        if isinstance(weight, Parameter):
            shape = weight.kernel_shape
            return cls(weight, adapter, shape, len(shape) > len(weight.state.shape))
        if adapter is not None or weight.dtype != jnp.float32:
            return cls(weight, adapter, weight.shape, len(weight.shape) > 2)
        return weight

    # An array of JAX or NumPy, where `OnHost` has NumPy's
    def __getitem__(self, index: Any) -> Any:
        """Return a layer of a stack, on the device, or the whole parameter (`...`)."""
        if not self.stacked:
            return _floats(self.weight, self.adapter)
        if index is ...:
            return np.asarray(self)
        return _floats_of_layer(self.weight, self.adapter, index)

    def __array__(
        self, dtype: DTypeLike | None = None, copy: bool | None = None
    ) -> np.ndarray:
        if copy is False:
            raise ValueError("a trained weight is converted; reading it is a copy")
        return filled(self, self.stacked, dtype)


def _alone_in_stack(leaf: jax.Array) -> jax.Array:
    return leaf[None]


def _kernel(weight: Any, adapter: Any) -> jax.Array:
    if isinstance(weight, Parameter):
        return weight.kernel()
    return added(weight, adapter)


_floats = jax.jit(_kernel)


@jax.jit
def _floats_of_layer(weight: Any, adapter: Any, layer: jax.Array) -> jax.Array:
    return _kernel(*layer_of((weight, adapter), layer))


def floats(params: Any, quantized: Any) -> Any:
    """Return the parameters of a run in Flax's own tree, whose stored and frozen
    weights are `Trained`.

    Args:
      params: Parameters of a state.
      quantized: Its `layer_state`, read if there are adapters.
    """
    if has_adapters(params):
        return merged(params, quantized, Trained.of)
    return jax.tree.map(Trained.of, params, is_leaf=is_quantized)


def gathered(leaf: Any) -> np.ndarray:
    """Return a parameter in each process; all of them call this together."""
    if not isinstance(leaf, Trained):
        return whole(leaf)
    if not leaf.stacked:
        return whole(_floats(leaf.weight, leaf.adapter))
    layers = []
    for layer in range(leaf.shape[0]):
        layers.append(whole(_floats_of_layer(leaf.weight, leaf.adapter, layer)))
    return np.stack(layers)
