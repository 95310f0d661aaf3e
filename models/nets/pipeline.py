"""A Llama whose layers are split over devices, in stages that work on microbatches in
turn (GPipe).

`examples/pipeline.py` trains one. It has the parameters of `models.nets.llama.Llama`.
Kernels have a leading axis of layers, and `PartitionSpec("stage")` gives each stage its
own: float or stored, with their moments, they never leave it. In round t stage s runs
its layers on microbatch t - s and hands the result to the next stage:

    round       0    1    2    3    4
    stage 0     m0   m1   m2   m3
    stage 1          m0   m1   m2   m3

Each stage is idle in stages - 1 of microbatches + stages - 1 rounds.

An idle stage computes on numbers that nothing reads, because all stages share one
program; the gradient of unread numbers is zero. The backward pass is JAX's own:
`ppermute` in the other direction. Embedding and head are shared: each stage computes
them for its part of the positions, so no stage has more work than the others.

Quantization sees a device's part of a microbatch, so its scales equal the scales of the
unsplit model on the same rows. Loss and gradients are equal, too, as sums over all
rows.

Source: Huang et al. 2019, "GPipe".
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tcfp_jax.conversion import convert_to_tcfp
from tcfp_jax.paths import named_leaves
from tcfp_jax.recipes import Recipe
from tcfp_jax.sharding import state_shardings
from tcfp_jax.weights.layout import Weight
from tcfp_jax.weights.parameter import is_quantized

from .families import INCLUDE, learner
from .llama import layers_of
from .losses import head_losses
from .positions import rotations
from .shapes import ComputeDtype, LlamaConfig, kept_of_head

STAGE = "stage"


class Stage(nn.Module):
    """Some layers of a Llama, `[batch, positions, width]` to the same."""

    config: LlamaConfig
    dtype: ComputeDtype

    @nn.compact
    def __call__(self, x: jax.Array, rotation: jax.Array) -> jax.Array:
        """Apply the layers."""
        layers: Any = layers_of(self.config, self.dtype)
        return layers(x, rotation)[0]


@dataclass(frozen=True)
class Pipeline:
    """A Llama over the axis `stage` of a mesh; other axes, such as `data`, split the
    rows of each microbatch.

    Attributes:
      config: Size of the whole model.
      recipe: Recipe of the layers; embedding and head stay in `dtype`.
      mesh: Mesh with an axis `stage`, on which every device has `layers / stages`
        layers.
      microbatches: Number of parts of a batch. Microbatch i has the rows i, i +
        microbatches, ..., so that each device of a batch axis has its share and no row
        moves.
      dtype: Dtype of activations.

    Raises:
      ValueError: the mesh lacks the axis, stages do not divide the layers, or there is
        no microbatch.
    """

    config: LlamaConfig
    recipe: Recipe
    mesh: Mesh
    microbatches: int
    dtype: ComputeDtype = "bfloat16"

    def __post_init__(self) -> None:
        if STAGE not in self.mesh.axis_names:
            raise ValueError(
                f"a pipeline runs over the axis {STAGE!r} of a mesh, and this one has"
                f" {self.mesh.axis_names}; make one with jax.make_mesh((stages,"
                f" others), ({STAGE!r}, 'data'))"
            )
        if self.config.layers % self.stages:
            raise ValueError(
                f"{self.stages} stages do not divide {self.config.layers} layers, and"
                " every stage has as many; make a mesh with a divisor of the layers"
            )
        if self.microbatches < 1:
            raise ValueError(
                f"microbatches={self.microbatches} is below 1; cut the batch into at"
                " least one"
            )

    @property
    def stages(self) -> int:
        """Number of stages."""
        return int(self.mesh.shape[STAGE])

    @property
    def _others(self) -> tuple[str, ...]:
        return tuple(name for name in self.mesh.axis_names if name != STAGE)

    @property
    def weights(self) -> Recipe | Mapping[str, Weight]:
        """Weights of the whole model, for `store` and `error_feedback`."""
        return learner(self.config, self.recipe, self.dtype).weights

    def shardings(self, params: Any, init: Callable[[Any], Any] | None = None) -> Any:
        """Return the sharding of each parameter: layers on their stage, the rest on all
        devices.

        With `init`, it returns the shardings of the state `init(params)`.
        """
        found, treedef = named_leaves(params, is_quantized)
        at = functools.partial(NamedSharding, self.mesh)
        specs = [P(STAGE) if names[0] == "layers" else P() for names, _ in found]
        return state_shardings(treedef.unflatten(map(at, specs)), params, init)

    def apply(
        self, variables: Mapping[str, Any], tokens: jax.Array, targets: jax.Array
    ) -> jax.Array:
        """Return the cross-entropy of each target, float32 `[batch, positions]`, as
        `Llama.apply` does.

        Args:
          variables: "params" of a `Llama`, float or stored, and with `error_feedback`
            the "tcfp" of `layer_state`.
          tokens: Integers `[batch, positions]`.
          targets: Integers `[batch, positions]`.

        Raises:
          ValueError: microbatches do not divide the batch, other axes a microbatch, or
            stages the positions, or the sequence is longer than the context.
        """
        batch, positions = tokens.shape
        self._check(batch, positions)
        layers = {
            name: {"layers": tree["layers"]}
            for name, tree in variables.items()
            if "layers" in tree
        }
        shared = {**variables["params"]}
        del shared["layers"]
        part = P(None, self._others, STAGE)
        # Gradients of shared parameters are added over stages at their input, and
        # gradients of layers over other axes. GPU kernels do not declare the axes over
        # which their results vary, so the check is off.
        run = jax.shard_map(
            self._on_a_stage,
            mesh=self.mesh,
            in_specs=(P(STAGE), P(), part, part),
            out_specs=part,
            check_vma=False,
        )
        losses = run(layers, shared, self._cut(tokens), self._cut(targets))
        return losses.swapaxes(0, 1).reshape(batch, positions)

    def _cut(self, rows: jax.Array) -> jax.Array:
        """Return rows as `[microbatches, rows, positions]`."""
        return rows.reshape(-1, self.microbatches, rows.shape[-1]).swapaxes(0, 1)

    def _on_a_stage(
        self, layers: Any, shared: Any, tokens: jax.Array, targets: jax.Array
    ) -> jax.Array:
        """Run a stage: its own layers, and its part of the positions,
        `[microbatches, rows, part]`.
        """
        dtype = jnp.dtype(self.dtype)
        table = shared["embedding"]["embedding"]
        x = lax.all_gather(table[tokens].astype(dtype), STAGE, axis=2, tiled=True)
        y = self._rounds(layers, x)
        # The last stage sends each stage its positions.
        y = lax.all_to_all(y, STAGE, split_axis=2, concat_axis=0, tiled=True)
        y = y[-self.microbatches :]
        norm = nn.RMSNorm(epsilon=self.config.norm_eps, dtype=dtype)
        normed: Any = norm.apply({"params": shared["final_norm"]}, y)
        matrix = table.T if self.config.head == "tied" else shared["head"]["kernel"]
        return head_losses(
            normed, matrix, targets, kept=kept_of_head(self.config.remat)
        )

    def _rounds(self, layers: Any, x: jax.Array) -> jax.Array:
        """Send `[microbatches, rows, positions, width]` through all stages; only the
        last one has the result.
        """
        count = self.microbatches
        stage = lax.axis_index(STAGE)
        model = self._stage
        rotation = rotations(x.shape[2], self.config.head_size, self.config.rope_theta)
        onwards = [(i, i + 1) for i in range(self.stages - 1)]

        def one_round(arrived: jax.Array, t: jax.Array) -> tuple[jax.Array, jax.Array]:
            first = x[jnp.minimum(t, count - 1)]
            inputs = jnp.where(stage == 0, first, arrived)
            y: Any = model.apply(layers, inputs, rotation)
            return lax.ppermute(y, STAGE, onwards), y

        _, made = lax.scan(
            one_round, jnp.zeros_like(x[0]), jnp.arange(count + self.stages - 1)
        )
        return made[self.stages - 1 :]

    @property
    def _stage(self) -> nn.Module:
        own = dataclasses.replace(self.config, layers=self.config.layers // self.stages)
        return _converted_stage(own, self.recipe, self.dtype)

    def _check(self, batch: int, positions: int) -> None:
        if batch % self.microbatches:
            raise ValueError(
                f"microbatches={self.microbatches} do not divide a batch of {batch};"
                " choose a divisor, or another batch"
            )
        others = math.prod(self.mesh.shape[name] for name in self._others)
        if batch // self.microbatches % others:
            raise ValueError(
                f"{self._others} of {others} devices do not divide the"
                f" {batch // self.microbatches} rows of a microbatch; use fewer"
                f" microbatches, or a batch of {self.microbatches * others}"
            )
        if positions % self.stages:
            raise ValueError(
                f"{self.stages} stages do not divide {positions} positions, of which"
                " each does a part of embedding and head; choose a multiple"
            )
        if positions > self.config.context:
            raise ValueError(
                f"{positions} positions exceed the model's context of"
                f" {self.config.context}; shorten the sequence"
            )


@functools.lru_cache(maxsize=16)
def _converted_stage(
    config: LlamaConfig, recipe: Recipe, dtype: ComputeDtype
) -> nn.Module:
    x = jax.ShapeDtypeStruct((1, config.context, config.width), dtype)
    rotation = jax.ShapeDtypeStruct(
        (2, config.context, config.head_size // 2), jnp.float32
    )
    return convert_to_tcfp(Stage(config, dtype), recipe, x, rotation, include=INCLUDE)
