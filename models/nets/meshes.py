"""Placement of a model's parameters and of the windows of a batch on a mesh of devices.

    python -m models.train --mesh data=2,fsdp=2,tensor=2
        eight devices, of any number of processes

    data      splits the batch, and repeats weights
    fsdp
        splits the batch, and every kernel along its first axis: blocks of 8-bit moments
        lie along the last one
    tensor
        splits heads and hidden values: columns of query, key, value, gate and up, rows
        of output and down

A mesh has all three axes; an axis without a name has the size 1. Axes are automatic:
XLA's partitioner places every array that has no rule here.
"""

import contextlib
import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from pallas_kernels.specs import names, shards
from tcfp_jax.paths import path_names

AXES = ("data", "fsdp", "tensor")
BATCH = P(("data", "fsdp"))

# By the end of a parameter's path. A spec is of the last axes; leading axes, of a scan,
# are not split.
RULES = {
    "(query|key|value|gate|up)/kernel": P("fsdp", "tensor"),
    "(output|down)/kernel": P(("tensor", "fsdp"), None),
    "(qkv|mlp_in)/kernel": P("fsdp", "tensor"),
    "(projection|mlp_out)/kernel": P(("tensor", "fsdp"), None),
    "(qkv|mlp_in)/bias": P("tensor"),
    "(projection|mlp_out)/bias": P(),
    # Experts lie on the devices of `fsdp`.
    "router/kernel": P(),
    "(expert_gate_up|expert_down)/kernel": P("fsdp", None, None),
    # Not along its rows: a table that is also the head would need the activations of
    # all devices.
    "embedding/embedding": P("tensor", "fsdp"),
    "head/kernel": P("fsdp", "tensor"),
    "positions": P(None, "fsdp"),
    "[a-z_]*_norm/(scale|bias)": P(),
    "(query|key|value)/bias": P("tensor"),
}


def parse_mesh(text: str) -> dict[str, int]:
    """Return the sizes of axes in a text such as "data=2,fsdp=4".

    Raises:
      ValueError: the text is not such a list, an axis is unknown or named twice, or a
        size is below 1.

    >>> parse_mesh("data=2,fsdp=4")
    {'data': 2, 'fsdp': 4}
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\w+)\s*=\s*(\d+)\s*", part)
        if found is None:
            raise ValueError(
                f"mesh {text!r} has the part {part!r}; write sizes of axes, such as"
                " data=2,fsdp=2"
            )
        name, size = found[1], int(found[2])
        if name in sizes:
            raise ValueError(
                f"mesh {text!r} names the axis {name!r} twice; give it one size"
            )
        sizes[name] = size
    _check_sizes(sizes)
    return sizes


def make_mesh(sizes: Mapping[str, int]) -> Mesh:
    """Return a mesh of all devices of all processes with the axes `AXES`; `tensor` runs
    over neighbours.

    Raises:
      ValueError: an axis is unknown, a size is below 1, or the product of sizes is not
        the number of devices.

    >>> make_mesh({"fsdp": jax.device_count()}).axis_names
    ('data', 'fsdp', 'tensor')
    """
    _check_sizes(sizes)
    shape = tuple(sizes.get(name, 1) for name in AXES)
    devices = jax.device_count()
    if shape[0] * shape[1] * shape[2] != devices:
        product = " x ".join(f"{name}={size}" for name, size in sizes.items())
        raise ValueError(
            f"mesh {product} is of {shape[0] * shape[1] * shape[2]} devices, but there"
            f" are {devices} in {jax.process_count()} process(es); choose sizes whose"
            f" product is {devices}, such as fsdp={devices}"
        )
    return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def _check_sizes(sizes: Mapping[str, int]) -> None:
    for name, size in sizes.items():
        if name not in AXES:
            raise ValueError(
                f"mesh has the axis {name!r}, which is unknown; use axes of"
                f" {list(AXES)}"
            )
        if size < 1:
            raise ValueError(
                f"mesh has {name}={size}; every axis has a size of at least 1"
            )


def check_mesh(mesh: Mesh, *, batch: int, heads: Mapping[str, int]) -> None:
    """Raise `ValueError` if a mesh lacks an axis, or if an axis does not divide the
    batch or heads.
    """
    missing = [name for name in AXES if name not in mesh.axis_names]
    if missing:
        raise ValueError(
            f"the mesh has the axes {list(mesh.axis_names)}, and what is trained lies"
            f" along {list(AXES)}: {missing} is missing; make the mesh by"
            " models.nets.meshes.make_mesh, which gives it all of them"
        )
    data, fsdp, tensor = (mesh.shape[name] for name in AXES)
    if batch % (data * fsdp):
        raise ValueError(
            f"data={data} times fsdp={fsdp} does not divide batch={batch}, which they"
            f" split; use batch={-(-batch // (data * fsdp)) * data * fsdp}, or another"
            " mesh"
        )
    for name, count in heads.items():
        if count % tensor:
            raise ValueError(
                f"tensor={tensor} does not divide {name}={count}, which it splits;"
                " choose a divisor"
            )


def split_batch(x: jax.Array) -> jax.Array:
    """Return the same activations, `[batch, ...]`, with their batch split by the
    current mesh of `make_mesh`.

    Without this constraint XLA may split their width instead, and keep the whole batch
    on every device.
    """
    return _constrained(x, P(("data", "fsdp"), *[P.UNCONSTRAINED] * (x.ndim - 1)))


def batch_axes() -> tuple[str, ...]:
    """Return the axes of the current mesh of `make_mesh` over which XLA splits a
    batch.
    """
    mesh = jax.sharding.get_abstract_mesh()
    automatic = mesh.axis_types == (AxisType.Auto,) * len(AXES)
    return AXES[:2] if mesh.axis_names == AXES and automatic else ()


def looked_up(table: jax.Array, tokens: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Return rows of a table `[rows, width]` as `[*tokens, width]`, with the batch
    split by the current mesh.

    Each device looks up its part of the width for all tokens along `fsdp`. An
    all-to-all in `dtype` then moves the values, not the table. The gradient goes the
    same way back, and is added in the table's dtype on the device of the table.
    """
    rows = jnp.take(table, _constrained(tokens, P("data")), axis=0).astype(dtype)
    return split_batch(
        _constrained(rows, P("data", *[None] * (tokens.ndim - 1), "fsdp"))
    )


def everywhere(array: np.ndarray, mesh: Mesh | None) -> jax.Array:
    """Return an array of the host on every device of a mesh; None is JAX's own
    device.
    """
    if mesh is None:
        return jnp.asarray(array)
    given = np.asarray(array, jax.dtypes.canonicalize_dtype(array.dtype))
    return jax.make_array_from_callback(
        given.shape, NamedSharding(mesh, P()), lambda index: given[index]
    )


def _constrained(x: jax.Array, spec: P) -> jax.Array:
    mesh = jax.sharding.get_abstract_mesh()
    return jax.lax.with_sharding_constraint(x, spec) if mesh.axis_names == AXES else x


@dataclass(frozen=True)
class OnMesh:
    """A jitted function whose program is made for a mesh, which is current while it is
    traced; None means no mesh.
    """

    function: Any
    mesh: Mesh | None

    def __call__(self, *args: Any) -> Any:
        """Call the function."""
        with self._current():
            return self.function(*args)

    def lower(self, *args: Any) -> Any:
        """Return the function, lowered for arguments of these shapes."""
        with self._current():
            return self.function.lower(*args)

    def _current(self) -> AbstractContextManager[Any]:
        return (
            contextlib.nullcontext() if self.mesh is None else jax.set_mesh(self.mesh)
        )


def parameter_shardings(params: Any, mesh: Mesh) -> Any:
    """Return the sharding of each parameter of a Llama or a GPT by `RULES`, for arrays
    or shapes.

    Raises:
      ValueError: no rule names a parameter, or an axis does not divide a size.
    """

    def sharding(path: Any, leaf: Any) -> NamedSharding:
        spec = parameter_spec("/".join(path_names(path)), leaf.ndim)
        for axis, entry in enumerate(spec):
            if leaf.shape[axis] % shards(mesh, entry):
                sizes = " times ".join(
                    f"{name}={mesh.shape[name]}" for name in names(entry)
                )
                raise ValueError(
                    f"{sizes} does not divide axis {axis} of"
                    f" {'/'.join(path_names(path))} {list(leaf.shape)}, which it"
                    f" splits; choose a divisor of {leaf.shape[axis]}, or another size"
                )
        return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(sharding, params)


def parameter_spec(path: str, rank: int) -> P:
    """Return the spec of a parameter of a rank by `RULES`.

    >>> parameter_spec("layers/gate/kernel", 3) == P(None, "fsdp", "tensor")
    True
    """
    for pattern, spec in RULES.items():
        if re.search(f"(^|/){pattern}$", path):
            return P(*[None] * (rank - len(spec)), *spec) if len(spec) else P()
    raise ValueError(
        f"no rule says where the parameter {path} lies; give it a line in"
        " models.nets.meshes.RULES"
    )
