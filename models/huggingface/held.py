"""Matrices of a folder, each read when it is used, as float parameters of a model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from jax.typing import DTypeLike

from tcfp_jax.inference.safetensors import Held
from tcfp_jax.weights.layerwise import OnHost
from tcfp_jax.weights.stored import Stored

Index: TypeAlias = Any  # the number of a layer, or `...`


@dataclass(frozen=True)
class Matrices:
    """A float parameter whose matrices are in files: one matrix, or one per layer.

    `tcfp_jax.store` and `tcfp_jax.inference.quantize_params` read it layer by layer;
    `np.asarray` reads all of it.

    Attributes:
      tensors: arrays by name, such as `tcfp_jax.inference.safetensors.Held`.
      names: name of the matrix of each layer, or of one matrix alone.
      shape: shape of the parameter, `[layers, k, n]` or `[k, n]`.
      stacked: whether the parameter is a stack of layers.
      turned: whether the files hold the transposes, `[n, k]`.
      path: name of the parameter here, for messages.
      where: name of the folder, for messages; None looks for no values that are not
        finite.
      dtype: dtype of the parameter.
    """

    tensors: Mapping[str, np.ndarray]
    names: tuple[str, ...]
    shape: tuple[int, ...]
    stacked: bool
    turned: bool
    path: str
    where: str | None = None
    dtype: np.dtype = np.dtype(np.float32)

    def __getitem__(self, index: Index) -> np.ndarray:
        """Return a layer in the dtype of its file, or the whole parameter (`...`).

        Raises:
          ValueError: a value is not finite, or the file has changed.
        """
        if index is Ellipsis and self.stacked:
            return np.asarray(self)
        place = 0 if index is Ellipsis else index
        matrix = self.tensors[self.names[place]]
        if matrix.dtype.itemsize > self.dtype.itemsize:
            # A float64 beyond float32 is inf, and is found here
            with np.errstate(over="ignore"):
                matrix = matrix.astype(self.dtype)
        if self.where is not None and not np.isfinite(matrix).all():
            raise ValueError(
                f"{self.where} has values in {self.path!r} that are not finite; copy"
                " the file again"
            )
        return matrix.T if self.turned else matrix

    def __array__(
        self, dtype: DTypeLike | None = None, copy: bool | None = None
    ) -> np.ndarray:
        if copy is False:
            raise ValueError(f"{self.path} is in files; reading it is a copy")
        return filled(self, self.stacked, dtype)


def filled(
    parameter: OnHost, stacked: bool, dtype: DTypeLike | None = None
) -> np.ndarray:
    """Return a whole parameter, which is read layer by layer if it is a stack."""
    whole = np.empty(parameter.shape, parameter.dtype if dtype is None else dtype)
    layers = whole if stacked else whole[None]
    for place, layer in enumerate(layers):
        layer[...] = parameter[place]
    return whole


def described(
    tensors: Mapping[str, Any], name: str
) -> tuple[tuple[int, ...], np.dtype] | None:
    """Return (shape, dtype) of a tensor without reading it from a folder, or None for a
    stored weight.
    """
    if isinstance(tensors, Held):
        return tensors.described(name)
    found = tensors[name]
    return None if isinstance(found, Stored) else (tuple(found.shape), found.dtype)
