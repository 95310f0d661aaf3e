"""Shardings of training states: how a state lies on a mesh follows from how the
parameters lie.

    shardings = nn.get_sharding(variables, mesh)["params"]              Linen: nn.with_partitioning
    shardings = nn.logical_to_mesh_sharding(specs, mesh, rules)         Linen: logical names of axes
    shardings = nnx.get_named_sharding(nnx.state(model), mesh)          NNX
    shardings = {"kernel": NamedSharding(mesh, P("fsdp", "tensor"))}    JAX

    shardings = fsdp(params, mesh)                                      any tree, also of stored weights

    state = jax.eval_shape(tx.init, params)
    state = jax.jit(tx.init, out_shardings=state_shardings(shardings, state))(params)

A transposed copy swaps the kernel's axes. A block scale is split like the axis whose
blocks it counts. Moments and errors lie where their weight lies. Every device holds
counters and keys whole. So a step sends no part of a state over the mesh except the
largest magnitudes, which scales come from.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from pallas_kernels.scaling import Fp4
from tcfp_jax.optim.encoding import block_parts, narrow_leaves
from tcfp_jax.paths import PyTree, named_leaves, path_names
from tcfp_jax.weights.layout import Layout
from tcfp_jax.weights.placement import Placement, neighbours
from tcfp_jax.weights.stored import Stored, is_e5m2
from tcfp_jax.weights.training import is_stored, kernel_shape, training_of

__all__ = ["fsdp", "state_shardings"]

# Fields of our states and the fields next to them that they belong to.
# `_BESIDE_WEIGHTS` belong to `weights`.
_SCALES = {"mu_scale": "mu", "nu_scale": "nu", "scales": "inner"}
_BESIDE_WEIGHTS = ("amax", "errors", "scaled_errors")
# For each entry: whether it is a field of a state, and its name
_Path = tuple[tuple[bool, str], ...]


def state_shardings(params_shardings: PyTree, state: PyTree) -> PyTree:
    """Return the shardings of a state, given the shardings of its parameters: one
    `NamedSharding` for each array.

    It takes states of optax's transformations and ours, stored parameters
    (`tcfp_jax.store`), and trees of both. Prefer
    `state_shardings(shardings, (params, opt_state))`: stored parameters tell how a
    kernel of three axes became a matrix, which `opt_state` alone does not.

    An array of its parameter's shape lies as the parameter does. An array with some of
    its axes (factored moments) is split along those. Scalars and arrays without a
    parameter (counters, keys) are whole on every device.

    Args:
      params_shardings: a `NamedSharding` for each float parameter, by the same names.
        Give an array or `jax.ShapeDtypeStruct` with a sharding instead if the state
        does not tell the parameter's shape (factored moments alone, kernels of three
        axes in `opt_state` alone).
      state: a state or its `jax.eval_shape`, perhaps in Flax's boxes; for an
        `nnx.Optimizer`, its `opt_state`.

    Returns:
      A tree of the structure of `state`, for `out_shardings`, `jax.device_put` and
        checkpoints.

    Raises:
      TypeError: a leaf of `params_shardings` is not a sharding on a mesh.
      ValueError: a mesh does not divide an axis, or cuts a block of values that share a
        scale; a kernel's shard is not contiguous in the stored matrix; shardings on
        several meshes, of another tree, or without a parameter's shape.

    >>> mesh = jax.make_mesh((1,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> shardings = {"kernel": NamedSharding(mesh, PartitionSpec("fsdp", None))}
    >>> import optax
    >>> state = jax.eval_shape(optax.adam(0.1).init, {"kernel": jnp.ones((4, 2))})
    >>> found = state_shardings(shardings, state)[0]
    >>> found.mu["kernel"].spec == PartitionSpec("fsdp"), found.count.spec == PartitionSpec()
    (True, True)
    """
    found = _Units(params_shardings, state)
    return found.treedef.unflatten(
        [found.shardings(path, node) for path, node in found.nodes]
    )


def fsdp(
    params: PyTree,
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh,
    axis: str = "fsdp",
) -> PyTree:
    """Return a sharding for each parameter, which splits the largest axis that may be
    split over a mesh axis.

    An axis may be split if the mesh divides it, each device's part is contiguous in the
    stored matrix, and no block of values that share a scale is cut: neither a weight's,
    nor one of 128 values of an 8-bit moment. Every device holds a parameter whole if it
    has no such axis (four heads of 64 on eight devices), or fewer than two axes. A
    stack of layers is not split along its layers.

    Args:
      params: parameters or their shapes, stored (`tcfp_jax.store`) or float. Prefer
        stored ones: float kernels of three axes do not tell which of them a stored
        matrix merges.
      mesh: the mesh, perhaps an abstract one.
      axis: the name of its axis.

    Returns:
      A tree with one `NamedSharding` for each parameter, stored or float.
        `state_shardings` derives the shardings of
      the arrays inside: `state_shardings(fsdp(params, mesh), (params, opt_state))`.

    Raises:
      ValueError: the mesh has no such axis.

    >>> mesh = jax.sharding.AbstractMesh((8,), ("fsdp",))
    >>> found = fsdp({"kernel": jnp.ones((4, 64)), "bias": jnp.ones(64)}, mesh)
    >>> found["kernel"].spec == PartitionSpec(None, "fsdp"), found["bias"].spec == PartitionSpec()
    (True, True)
    """
    if axis not in mesh.axis_names:
        raise ValueError(
            f"axis={axis!r}, but the mesh has the axes {list(mesh.axis_names)}; name"
            " one of them"
        )
    found, treedef = named_leaves(params, is_stored)
    narrow = narrow_leaves(params, is_leaf=is_stored, sizes=_kernel_shape)
    chosen = []
    for (names, leaf), small in zip(found, narrow, strict=True):
        shape = _kernel_shape(leaf)
        layers = (
            len(shape) - training_of(leaf).weight.layout.ndim if is_stored(leaf) else 0
        )
        largest_first = (
            sorted(range(layers, len(shape)), key=lambda place: -shape[place])
            if len(shape) > 1
            else []
        )
        whole = NamedSharding(mesh, PartitionSpec())
        tried = (
            NamedSharding(mesh, PartitionSpec(*[None] * place, axis))
            for place in largest_first
        )
        legal = (
            sharding
            for sharding in tried
            if _is_legal(_Parameter("/".join(names), sharding, shape), leaf, small)
        )
        chosen.append(next(legal, whole))
    return treedef.unflatten(chosen)


def shardings_of(params: PyTree) -> PyTree | None:
    """Return how each parameter lies, for `state_shardings`; None unless all of them
    lie on a mesh.
    """
    found, treedef = named_leaves(params, is_stored)
    shardings = []
    for _, leaf in found:
        array = leaf.backward.values if is_stored(leaf) else leaf
        sharding = (
            None
            if isinstance(array, jax.core.Tracer)
            else getattr(array, "sharding", None)
        )
        if not isinstance(sharding, NamedSharding):
            return None
        shape = _kernel_shape(leaf)
        if is_stored(leaf):
            sharding = (
                training_of(leaf)
                .weight.layout.stacked(len(shape))
                .kernel_sharding(sharding, shape)
            )
        shardings.append(jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding))
    return treedef.unflatten(shardings)


def _kernel_shape(leaf: PyTree) -> tuple[int, ...]:
    return kernel_shape(leaf) if is_stored(leaf) else jnp.shape(leaf)


def _is_legal(parameter: "_Parameter", leaf: PyTree, narrow: bool) -> bool:
    """Return whether a parameter may lie so, as the weight that it is and with 8-bit
    moments if those are `narrow`.
    """
    try:
        parts = parameter.kernel
        if is_stored(leaf):
            layout = training_of(leaf).weight.layout.stacked(len(parts.shape))
            parts = parts.merged(layout.groups)
            _of_stored(leaf, parts, parameter)
        if narrow:
            block_parts(parts)
    except ValueError:  # the errors are the definition of a legal placement
        return False
    return True


@dataclass(frozen=True)
class _Parameter:
    """One parameter: its sharding, and its shape and the layout of its matrix if they
    are known.
    """

    name: str
    sharding: NamedSharding
    shape: tuple[int, ...] | None
    layout: Layout | None = None

    @property
    def kernel(self) -> Placement:
        assert self.shape is not None, "_learn_shapes found it"
        return Placement.of(self.name, self.shape, self.sharding)

    def matrix(self, shape: Sequence[int]) -> Placement:
        """Return the parts of the stored matrix, or stack of matrices, of this
        shape.
        """
        assert self.shape is not None
        groups = (
            self.layout.groups
            if self.layout is not None
            else neighbours(self.shape, shape)
        )
        if groups is None:
            raise ValueError(
                f"{self.name} {list(self.shape)} is stored as {list(shape)}, whose axes"
                " do not merge neighbours of it; leave the parameter whole, or give"
                " the stored parameters too: state_shardings(shardings, (params,"
                " opt_state))"
            )
        return self.kernel.merged(groups)

    def matrix_of(self, stored: Stored) -> Placement:
        """Return the parts of the stored matrix; padded 4-bit codes may have one value
        more along k.
        """
        assert self.shape is not None
        if isinstance(stored.scaling, Fp4) and self.layout is None:
            k = -2 if stored.backward is None else -1
            short = list(stored.shape)
            short[k] -= 1
            if (
                neighbours(self.shape, stored.shape) is None
                and neighbours(self.shape, short) is not None
            ):
                return self.matrix(short)
        return self.matrix(stored.shape)


class _Units:
    """The nodes of a state, with stored weights whole, and the parameters that they
    belong to.
    """

    def __init__(self, params_shardings: PyTree, state: PyTree) -> None:
        treedef: Any
        paths, treedef = jax.tree_util.tree_flatten_with_path(state, is_leaf=is_stored)
        self.treedef = treedef
        self.nodes: list[tuple[_Path, Any]] = [
            (_entries(path), node) for path, node in paths
        ]
        self.by_name = {_names(path): node for path, node in self.nodes}
        given = jax.tree_util.tree_flatten_with_path(params_shardings)[0]
        self.parameters = {
            _entries(path): _parameter("/".join(path_names(path)), leaf)
            for path, leaf in given
        }
        if not self.parameters:
            raise ValueError(
                "params_shardings is empty; give the sharding of each parameter"
            )
        self.without_kinds = {_names(path): path for path in self.parameters}
        self.mesh = _one_mesh(list(self.parameters.values()))
        self._learn_shapes()

    def shardings(self, path: _Path, node: Any) -> PyTree:
        """Return the node with shardings instead of arrays."""
        if is_stored(node):
            parameter = self._owner(path)
            if parameter is None:
                raise self._stranger(path, node)
            tree = _of_stored(node, parameter.matrix_of(node), parameter)
            return jax.tree.unflatten(jax.tree.structure(node), jax.tree.leaves(tree))
        parts = self._parts(path, node)
        return (
            NamedSharding(self.mesh, PartitionSpec())
            if parts is None
            else parts.sharding
        )

    def _parts(self, path: _Path, leaf: Any) -> Placement | None:
        """Return how an array is cut; None if every device holds it whole."""
        shape = jnp.shape(leaf)
        values_path = self._beside(path, _SCALES)
        if values_path is not None:
            values = self._parts(values_path, self.by_name[_names(values_path)])
            return None if values is None else block_parts(values)
        parameter = self._owner(path)
        if parameter is None:
            if len(shape) >= 2 and jnp.issubdtype(leaf.dtype, jnp.inexact):
                raise self._stranger(path, leaf)
            return None
        if not any(parameter.sharding.spec) or not shape:
            return None
        weights_path = self._beside(path, dict.fromkeys(_BESIDE_WEIGHTS, "weights"))
        weight = None if weights_path is None else self.by_name[_names(weights_path)]
        if isinstance(weight, Stored):
            matrix = parameter.matrix_of(weight)
            return (
                matrix
                if shape == matrix.shape
                else matrix.taken(range(len(shape)), shape)
            )
        return _following(parameter, shape)

    def _owner(self, path: _Path) -> _Parameter | None:
        """Return the parameter with the longest path that ends this one, or that
        follows a field of a state in it.
        """
        for known, own in ((self.parameters, path), (self.without_kinds, _names(path))):
            for start in range(len(own)):
                if own[start:] in known:
                    found: Any = own[start:]
                    return self.parameters[
                        found if known is self.parameters else self.without_kinds[found]
                    ]
        for start in range(1, len(path)):
            for end in range(len(path) - 1, start, -1):
                if path[start - 1][0] and path[start:end] in self.parameters:
                    return self.parameters[path[start:end]]
        return None

    def _beside(self, path: _Path, fields: dict[str, str]) -> _Path | None:
        """Return the path with one of these fields replaced by the field it belongs to,
        if a node is there.
        """
        for place in reversed(range(len(path))):
            kind, name = path[place]
            if name in fields:
                other = (*path[:place], (kind, fields[name]), *path[place + 1 :])
                if _names(other) in self.by_name:
                    return other
        return None

    def _learn_shapes(self) -> None:
        """Find shapes and layouts of parameters, from stored parameters first, then
        from arrays that mirror them.
        """
        shapes: dict[str, set[tuple[int, ...]]] = {}
        for path, node in self.nodes:
            parameter = self._owner(path)
            if parameter is None:
                continue
            if is_stored(node) and node.training is not None:
                layout = training_of(node).weight.layout.stacked(
                    len(kernel_shape(node))
                )
                place = next(
                    key
                    for key, known in self.parameters.items()
                    if known.name == parameter.name
                )
                if parameter.shape not in (None, kernel_shape(node)):
                    raise ValueError(
                        f"{parameter.name} is {list(parameter.shape or ())} by its"
                        f" sharding, but {kernel_shape(node)} is stored; give the"
                        " shardings of these very parameters"
                    )
                self.parameters[place] = replace(
                    parameter, shape=kernel_shape(node), layout=layout
                )
            elif self._beside(path, _SCALES) is None:
                shapes.setdefault(parameter.name, set()).add(tuple(node.shape))
        for place, parameter in self.parameters.items():
            if parameter.shape is None and parameter.name in shapes:
                self.parameters[place] = replace(
                    parameter, shape=_shape(parameter, shapes[parameter.name])
                )

    def _stranger(self, path: _Path, node: Any) -> ValueError:
        known = sorted(parameter.name for parameter in self.parameters.values())
        return ValueError(
            f"{'/'.join(_names(path))} {list(node.shape)} belongs to none of the"
            f" {len(known)} parameters, such as {known[:3]}; give the shardings of this"
            " state's own parameters. For an nnx.Optimizer give its opt_state, because"
            " nnx.state takes stored weights apart"
        )


def _of_stored(stored: Stored, matrix: Placement, parameter: _Parameter) -> Stored:
    """Return a stored weight with shardings instead of arrays."""
    stack = range(len(matrix.shape) - 2)
    sizes = matrix.shape[:-2]
    beside: Any = lambda array: (
        None if array is None else matrix.taken([*stack, None], array.shape).sharding
    )

    def operand(given: Any, parts: Placement) -> Any:
        if given is None:
            return None
        scale = parts.scales(given.scaling)
        # a stack that was quantized as one tensor
        if given.scale.shape == () != scale.shape:
            scale = parts.taken((), ())
        if isinstance(given.scaling, Fp4):
            codes = parts.counted(
                (*[1] * (len(parts.shape) - 1), 2), "a recipe of 8 bits"
            )
            outer = None if given.outer is None else matrix.taken(stack, sizes).sharding
            return replace(
                given, values=codes.sharding, scale=scale.sharding, outer=outer
            )
        of = lambda array, parts: None if array is None else parts.sharding
        values, lo = of(given.values, parts), of(given.lo, parts)
        return replace(
            given,
            values=values,
            lo=lo,
            scale=scale.sharding,
            lo_scale=of(given.lo_scale, scale),
        )

    training = stored.training
    if training is not None:
        training = replace(
            training,
            rounding=beside(training.rounding),
            amax=matrix.taken(stack, sizes).sharding,
            error=None if training.error is None else matrix.sharding,
            slot=None if training.slot is None else parameter.kernel.sharding,
            sample=beside(training.sample),
        )
    sides: Any = dict(
        forward=operand(stored.forward, matrix.turned()),
        backward=operand(stored.backward, matrix),
    )
    return replace(
        stored,
        **sides,
        sample=beside(stored.sample),
        training=training,
        e5m2=is_e5m2(stored),
    )


def _following(parameter: _Parameter, shape: tuple[int, ...]) -> Placement | None:
    """Return how an array of a state is cut: a parameter's copy, its matrix, a stack of
    copies, or some of its axes.
    """
    assert parameter.shape is not None, "an array in its place has a shape"
    whole = parameter.kernel
    own, count = parameter.shape, len(parameter.shape)
    if shape == own:
        return whole
    if parameter.layout is not None and shape == parameter.layout.matrix_shape(own):
        return parameter.matrix(shape)
    if shape[-count:] == own:
        return whole.taken([*[None] * (len(shape) - count), *range(count)], shape)
    if len(shape) == count and all(
        size in (1, full) for size, full in zip(shape, own, strict=True)
    ):
        return whole.taken(
            [axis if shape[axis] == own[axis] else None for axis in range(count)], shape
        )
    if len(shape) < count and neighbours(own, shape) is not None:
        return parameter.matrix(shape)
    lacking = [[axis for axis in range(count) if axis != left] for left in range(count)]
    fitting = {
        whole.taken(axes, shape)
        for axes in lacking
        if tuple(own[axis] for axis in axes) == shape
    }
    return fitting.pop() if len(fitting) == 1 else None


def _shape(parameter: _Parameter, shapes: set[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the shape of a parameter, given the shapes of its arrays in the state;
    scalars tell nothing.
    """
    spec = parameter.sharding.spec
    shapes = shapes - {()} or {()}
    if len(shapes) > 1:
        full = {shape for shape in shapes if len(shape) == len(spec)}
        if len(full) != 1 and any(spec):
            raise ValueError(
                f"the state has arrays {sorted(shapes)} of {parameter.name}, whose"
                f" sharding {spec} does not tell its shape; give"
                " jax.ShapeDtypeStruct(shape, dtype, sharding=...) instead of the"
                " sharding"
            )
        shapes = full or shapes
    shape, *_ = sorted(shapes)
    return shape


def _parameter(name: str, leaf: Any) -> _Parameter:
    sharding = (
        leaf
        if isinstance(leaf, jax.sharding.Sharding)
        else getattr(leaf, "sharding", None)
    )
    if not isinstance(sharding, NamedSharding):
        raise TypeError(
            f"the sharding of {name} is {sharding or leaf!r}, which has no mesh; give"
            " NamedSharding(mesh, spec), an array that was placed with one, or the"
            " result of nn.get_sharding or nnx.get_named_sharding"
        )
    return _Parameter(name, sharding, None if leaf is sharding else tuple(leaf.shape))


def _one_mesh(
    parameters: list[_Parameter],
) -> jax.sharding.Mesh | jax.sharding.AbstractMesh:
    first = parameters[0]
    for other in parameters:
        if other.sharding.mesh != first.sharding.mesh:
            raise ValueError(
                f"{first.name} lies on {first.sharding.mesh}, but {other.name} on"
                f" {other.sharding.mesh}; a state lies on one mesh, give all shardings"
                " on it"
            )
    return first.sharding.mesh


def _entries(path: Sequence[object]) -> _Path:
    names = path_names(path)
    return tuple(
        (isinstance(entry, jax.tree_util.GetAttrKey), name)
        for entry, name in zip(path, names, strict=False)
    )


def _names(path: _Path) -> tuple[str, ...]:
    return tuple(name for _, name in path)
