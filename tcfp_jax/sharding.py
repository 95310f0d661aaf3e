"""Shardings of training states: the parameters' shardings decide those of the state.

    shardings = fsdp(params, mesh)                  # any tree, also of stored weights
    shardings = {"kernel": NamedSharding(mesh, P("fsdp", "tensor"))}             # JAX
    shardings = nn.get_sharding(variables, mesh)["params"]         # Linen: mesh names
    shardings = nn.logical_to_mesh_sharding(specs, mesh, rules)  # Linen: logical names
    shardings = nnx.get_named_sharding(nnx.state(model, nnx.Param), mesh)        # NNX

    places = state_shardings(shardings, params, tx.init)
    state = jax.jit(tx.init, out_shardings=places)(params)

With explicit mesh axes, the sharding is part of an array's type. `state_shardings`
traces the function that makes the state, with such types, and reads the types of its
results. So a transposed copy swaps the kernel's axes, a block scale is split like the
axis whose blocks it counts, and moments and errors are sharded like their weight.
Counters and keys are whole on every device. A step then sends no part of a state over
the mesh except the largest magnitudes, which scales come from.

Left out: `fsdp` splits one axis of each parameter over one mesh axis. It does not place
activations or batches, and it does not split over a second axis for tensor parallelism.
Write those shardings yourself (docs/sharding.md), or let a library of rules for logical
axis names choose them.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from pallas_kernels.specs import Shape, shards
from tcfp_jax.optim.encoding import block_parts, narrow_leaves
from tcfp_jax.optim.feedback import layer_state
from tcfp_jax.paths import PyTree, entries, leaves, named_leaves
from tcfp_jax.weights.parameter import is_quantized, parameter_of
from tcfp_jax.weights.placement import AnyMesh, Placement, shortest
from tcfp_jax.weights.rounding import make_parameter

__all__ = ["fsdp", "state_shardings"]

_Typed: TypeAlias = jax.ShapeDtypeStruct


def state_shardings(
    params_shardings: PyTree,
    params: PyTree,
    init: Callable[[PyTree], PyTree] | None = None,
) -> PyTree:
    """Return the shardings of a state, given the shardings of its parameters.

    Use this for `out_shardings`, `jax.device_put` and checkpoints, whenever the
    parameters are on a mesh: XLA may otherwise keep whole moments on every device.

    It traces `init(params)` with explicit mesh axes and reads the types of the results.
    An array that `init` makes without a sharding is whole on every device: counters,
    keys, and the memory of `optax.lbfgs`.

    Args:
      params_shardings: a `NamedSharding` for each parameter, by the same names. For a
        stored parameter it is the sharding of its float kernel, or the result of
        `state_shardings` for it.
      params: the parameters or their shapes, stored (`tcfp_jax.store`) or float,
        perhaps in Flax's boxes.
      init: a function of the parameters that returns the state, such as `tx.init`, or
        `lambda params: (params, tx.init(params))`. None stands for the parameters
        themselves.

    Returns:
      A tree of the structure of `init(params)`, with a `NamedSharding` for each array.

    Raises:
      TypeError: a leaf of `params_shardings` is not a sharding on a mesh.
      ValueError: a mesh does not divide an axis, or cuts a block of values that share a
        scale. A kernel's shard is not contiguous in the stored matrix. Shardings are on
        several meshes, or a parameter has none.

    >>> import optax
    >>> mesh = jax.make_mesh((1,), ("fsdp",), axis_types=(AxisType.Auto,))
    >>> shardings = {"kernel": NamedSharding(mesh, PartitionSpec("fsdp", None))}
    >>> params = {"kernel": jnp.ones((4, 2))}
    >>> found = state_shardings(shardings, params, optax.adam(0.1).init)[0]
    >>> found.mu["kernel"].spec == PartitionSpec("fsdp")
    True
    >>> found.count.spec == PartitionSpec()
    True
    """
    found, treedef = named_leaves(params, is_quantized)
    given = leaves(params_shardings, is_quantized)
    mesh = _one_mesh(given)
    types = (AxisType.Explicit,) * len(mesh.axis_names)
    explicit = AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=types)
    with jax.sharding.use_abstract_mesh(explicit):
        typed = {}
        for names, leaf in found:
            name = "/".join(names)
            typed[name] = _typed(name, leaf, _given(name, given), explicit)
        state = treedef.unflatten(typed.values())
        if init is not None:
            state = jax.eval_shape(init, state)
    for name, weight in entries(layer_state(state)).items():
        if name in typed:
            _check_parts(name, typed[name], weight)

    def on_mesh(leaf: _Typed) -> NamedSharding:
        spec = () if leaf.sharding is None else leaf.sharding.spec
        return NamedSharding(mesh, shortest(spec))

    return jax.tree.map(on_mesh, state)


def fsdp(params: PyTree, mesh: AnyMesh, axis: str = "fsdp") -> PyTree:
    """Return a sharding for each parameter, which splits its largest axis that may be.

    Use this for fully sharded data parallelism on one mesh axis. Write the shardings by
    hand for a mesh with a `tensor` axis.

    An axis may be split if the mesh divides it, and if each device's part is contiguous
    in the stored matrix. No block of values that share a scale may be cut: neither a
    weight's, nor one of 128 values of an 8-bit moment. Every device holds a parameter
    whole if it has no such axis (four heads of 64 on eight devices), or fewer than two
    axes. A stack of layers is not split along its layers.

    Args:
      params: parameters or their shapes, stored (`tcfp_jax.store`) or float. Prefer
        stored ones: float kernels of three axes do not show which of them a stored
        matrix merges.
      mesh: the mesh, perhaps an abstract one.
      axis: the name of its axis.

    Returns:
      A tree with one `NamedSharding` for each parameter, stored or float.
        `state_shardings` derives the shardings of the arrays inside:
        `state_shardings(fsdp(params, mesh), params, init)`.

    Raises:
      ValueError: the mesh has no such axis.

    >>> mesh = jax.sharding.AbstractMesh((8,), ("fsdp",))
    >>> found = fsdp({"kernel": jnp.ones((4, 64)), "bias": jnp.ones(64)}, mesh)
    >>> found["kernel"].spec == PartitionSpec(None, "fsdp")
    True
    >>> found["bias"].spec == PartitionSpec()
    True
    """
    if axis not in mesh.axis_names:
        raise ValueError(
            f"axis={axis!r}, but the mesh has the axes {list(mesh.axis_names)}; name"
            " one of them"
        )
    found, treedef = named_leaves(params, is_quantized)
    narrow = narrow_leaves(params)
    chosen = []
    for (_, leaf), small in zip(found, narrow, strict=True):
        places = _axes_by_size(leaf)
        tried = [NamedSharding(mesh, PartitionSpec(*[None] * i, axis)) for i in places]
        is_legal = functools.partial(_is_legal, leaf, small)
        whole = NamedSharding(mesh, PartitionSpec())
        chosen.append(next(filter(is_legal, tried), whole))
    return treedef.unflatten(chosen)


def shardings_of(params: PyTree) -> PyTree | None:
    """Return the sharding of each array, or None unless all of them are on a mesh."""
    arrays = jax.tree.leaves(params)
    for array in arrays:
        if isinstance(array, jax.core.Tracer):
            return None
        if not isinstance(getattr(array, "sharding", None), NamedSharding):
            return None
    return jax.tree.map(lambda array: array.sharding, params) if arrays else None


def _kernel_shape(leaf: PyTree) -> Shape:
    return parameter_of(leaf).kernel_shape if is_quantized(leaf) else jnp.shape(leaf)


def _axes_by_size(leaf: PyTree) -> list[int]:
    """Return the axes of a parameter that may be split, the largest first."""
    shape = _kernel_shape(leaf)
    if len(shape) < 2:
        return []
    layers = 0
    if is_quantized(leaf):
        layers = len(shape) - len(parameter_of(leaf).state.shape)
    return sorted(range(layers, len(shape)), key=lambda axis: -shape[axis])


def _is_legal(leaf: PyTree, narrow: bool, sharding: NamedSharding) -> bool:
    """Return whether a parameter, perhaps with 8-bit moments, may have a sharding."""
    try:
        parts = _matrix("a parameter", leaf, sharding)
        if narrow:
            block_parts(parts)
    except ValueError:  # the errors are the definition of a legal placement
        return False
    return True


def _matrix(name: str, leaf: PyTree, sharding: NamedSharding) -> Placement:
    """Return the placement of a parameter, of its matrix if it is stored.

    Raises:
      ValueError: the stored form cannot be split so.
    """
    parts = Placement.of(name, _kernel_shape(leaf), sharding)
    if is_quantized(leaf):
        parameter = parameter_of(leaf)
        recipe = parameter.state.weight.recipe
        parts = parts.merged(parameter.layout.groups)
        parts.check_blocks(recipe.scaling, turned=recipe.copies == "both")
    return parts


def _typed(name: str, leaf: PyTree, sharding: PyTree, mesh: AbstractMesh) -> PyTree:
    """Return a parameter as types with shardings on an explicit mesh."""

    def typed(array: PyTree, sharding: NamedSharding) -> _Typed:
        own = NamedSharding(mesh, sharding.spec)
        return _Typed(array.shape, array.dtype, sharding=own)

    if is_quantized(sharding):
        return jax.tree.map(typed, leaf, sharding)
    _matrix(name, leaf, sharding)
    if not is_quantized(leaf):
        return typed(leaf, sharding)
    parameter = parameter_of(leaf)
    state = parameter.state
    made = functools.partial(
        make_parameter,
        weight=state.weight,
        remainder=state.remainder,
        gradient_dtype=state.gradient_dtype,
    )
    kernel = typed(_Typed(parameter.kernel_shape, state.dtype), sharding)
    has_key = state.rounding is not None
    key = jax.eval_shape(jax.random.key, 0) if has_key else None
    stored = jax.eval_shape(made, kernel, key=key)
    return jax.tree.unflatten(jax.tree.structure(leaf), jax.tree.leaves(stored))


def _check_parts(name: str, parameter: PyTree, weight: PyTree) -> None:
    """Raise unless a weight of `error_feedback` has as many parts as its parameter."""
    if _most_parts(weight) < _most_parts(parameter):
        array = jax.tree.leaves(parameter)[0]
        raise ValueError(
            f"{name} {list(array.shape)}: {array.sharding.spec} splits an axis that the"
            " stored matrix merges with another one, and its parts are not contiguous"
            " there; split the first of the merged axes instead, or leave both whole"
        )


def _most_parts(tree: PyTree) -> int:
    """Return the largest number of parts of an array of a tree."""
    counts = [1]
    for leaf in jax.tree.leaves(tree):
        if leaf.sharding is not None:
            parts = [shards(leaf.sharding.mesh, entry) for entry in leaf.sharding.spec]
            counts.append(math.prod(parts))
    return max(counts)


def _given(name: str, given: Mapping[str, PyTree]) -> PyTree:
    if name not in given:
        raise ValueError(
            f"{name} has no sharding among the {len(given)} of params_shardings, such"
            f" as {min(given)}; give the sharding of each parameter, and the function"
            " that makes the state: state_shardings(shardings, params, tx.init)"
        )
    return given[name]


def _one_mesh(given: Mapping[str, PyTree]) -> AnyMesh:
    """Return the mesh of all shardings."""
    first = None
    for name, node in given.items():
        for sharding in jax.tree.leaves(node):
            if not isinstance(sharding, NamedSharding):
                raise TypeError(
                    f"the sharding of {name} is {sharding!r}, which has no mesh; give"
                    " NamedSharding(mesh, spec), or the result of nn.get_sharding or"
                    " nnx.get_named_sharding"
                )
            first = first or (name, sharding.mesh)
            if sharding.mesh != first[1]:
                raise ValueError(
                    f"{first[0]} is on {first[1]}, but {name} on {sharding.mesh}; a"
                    " state is on one mesh, give all shardings on it"
                )
    if first is None:
        raise ValueError(
            "params_shardings is empty; give the sharding of each parameter"
        )
    return first[1]
