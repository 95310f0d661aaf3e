"""Which parameters `train_step` can update inside the backward pass.

A parameter is updated once in a step, when its gradient is complete. That is the end of
a round for a stack that one scan runs over, and the one place that reads a matrix
outside of loops. The loss is traced once with parameters that read zeros (`_Shapes`),
and their indices show in its program where each is read.
"""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core

from tcfp_jax.optim.adam import Leaf, Tree
from tcfp_jax.optim.gradients import guarding_keys
from tcfp_jax.paths import PyTree
from tcfp_jax.weights.deferred import Deferred, Home, Slots
from tcfp_jax.weights.parameter import Parameter
from tcfp_jax.weights.stored import Stored

_OF_INDICES = (
    "train_step traced the loss with stacks of stored weights as the numbers of their"
    " entries: a scan may run over a stack, and its body may multiply by an entry, but"
    " not cut it further. If the loss runs otherwise, take the ordinary step"
    " (value_and_grad, update, apply_updates)"
)
_SLOT = "tcfp_slot"  # the name of the equation that `_Shapes.slot` leaves
ORDINARY = (
    "read tcfp_jax.dequantize(params) in an ordinary step (value_and_grad, update,"
    " apply_updates)"
)


class _Shapes(Home):
    """A parameter of which a trace reads zeros; it records whether all of a stack is
    read.
    """

    def __init__(self, parameter: Parameter) -> None:
        self.whole = jax.eval_shape(lambda: parameter)
        self.stacked = len(parameter.shape) > 2
        self.is_read_whole = False
        self._slots = Slots()

    def read(self, index: Array) -> Stored:
        if index.ndim:
            self.is_read_whole = True
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self._shapes(index))

    def slot(self, index: Array, zero: Array) -> Array:
        def make() -> Array:
            # It reads both arrays, which shows where in the program they stand.
            dtype = self.whole.state.gradient_dtype
            value = checkpoint_name(index, _SLOT).astype(dtype)
            value += checkpoint_name(zero, _SLOT).astype(dtype)
            return jnp.broadcast_to(value, self._shapes(index).shape)

        return self._slots.find(index, zero, make)

    def _shapes(self, index: Array) -> Stored:
        shapes = self.whole.stored
        if index.ndim or not self.stacked:
            return shapes
        return jax.tree.map(_without_layers, shapes)


def arrays_of(zero: Array) -> tuple[Array, Array, Array]:
    """Return the index, the zero and the keys of a `Deferred`."""
    shape = zero.shape
    index = jnp.arange(shape[0], dtype=jnp.int32) if shape else jnp.int32(0)
    return index, zero, guarding_keys(shape)


def _without_layers(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape[1:], x.dtype)


def updated_inside(
    tree: Tree, loss_fn: Callable[..., PyTree], inputs: tuple[PyTree, ...]
) -> list[int]:
    """Return the numbers of the parameters that are updated inside: stacks that one
    scan runs over, and matrices that one place outside of loops reads.

    Raises:
      TypeError: the loss computes with arrays of a stored weight.
      ValueError: a scan runs over a stack, and something else reads it, too.

    Warns:
      UserWarning: no scan runs over a stack, or more than a quarter of the stacks'
        values is not updated inside.
    """
    homes: dict[int, _Shapes] = {}
    for number, leaf in enumerate(tree.leaves):
        own = leaf.parameter
        if isinstance(own, Parameter) and leaf.is_fused and 1 not in own.shape[:-2]:
            homes[number] = _Shapes(own)

    def loss_of(given: dict[int, tuple[Array, Array, Array]]) -> PyTree:
        leaves = [leaf.parameter for leaf in tree.leaves]
        for number, arrays in given.items():
            leaves[number] = Deferred(*arrays, homes[number])
        return loss_fn(tree.treedef.unflatten(leaves), *inputs)

    given = {}
    for number, home in homes.items():
        layers = home.whole.shape[:-2][:1]
        given[number] = arrays_of(jnp.zeros(layers, jnp.float32))
    try:
        program = jax.make_jaxpr(loss_of)(given)
    except Exception as error:
        error.add_note(_OF_INDICES)
        raise
    uses = {var: _Uses() for var in program.jaxpr.invars}
    of_arrays = [*uses.values()]
    _find_uses(program.jaxpr, uses)
    for var in program.jaxpr.outvars:
        if not isinstance(var, core.Literal) and var in uses:
            uses[var].others += ("the result",)
    found = []
    readers: dict[int, tuple[str, ...]] = {}
    for (number, home), use, of_zero in zip(
        homes.items(), of_arrays[::3], of_arrays[1::3], strict=True
    ):
        readers[number] = use.others
        _check_alike(tree.leaves[number], use, of_zero)
        if not home.stacked and use.others == (_SLOT,):
            found.append(number)
        if not use.scans:
            continue
        if use.scans > 1 or use.others not in ((), (_SLOT,)) or home.is_read_whole:
            raise ValueError(_read_elsewhere(tree.leaves[number], use, home))
        found.append(number)
    _warn_of_whole_gradients(tree, found, readers)
    return found


def _warn_of_whole_gradients(
    tree: Tree, inside: Sequence[int], readers: Mapping[int, Sequence[str]]
) -> None:
    """Warn if a stack could be updated inside and is not, because of its readers, or if
    many of the stacks' values are not.

    A float array of three axes or more counts as a stack. If nothing is stored, float
    matrices count, too.
    """
    is_stored = any(isinstance(leaf.parameter, Parameter) for leaf in tree.leaves)
    whole = []
    values = 0
    held = 0
    is_surprise = False
    for number, leaf in enumerate(tree.leaves):
        own = leaf.parameter
        if isinstance(own, Parameter):
            is_stack = math.prod(own.shape[:-2]) > 1
        else:
            is_stack = own.ndim > (2 if is_stored else 1)
        if not is_stack:
            continue
        size = math.prod(own.shape)
        values += size
        if number not in inside:
            held += size
            why = _why_behind(leaf, readers.get(number, ()))
            whole.append(f"{'/'.join(leaf.names)} {list(own.shape)} ({why})")
            is_surprise |= leaf.is_fused
    # Narrow matrices of small models, such as keys of few heads, are no surprise.
    if is_surprise or held > values / 4:
        warnings.warn(
            "train_step holds the gradients of all layers of some weights, as the"
            f" ordinary step does: {', '.join(whole)}; store the weights"
            " (tcfp_jax.store), and scan over the stack itself, with"
            ' adamw(moments="8bit"), a recipe with one scale per weight, and matrices'
            " of 128 columns or more",
            stacklevel=2,
        )


def _why_behind(leaf: Leaf, readers: Sequence[str]) -> str:
    """Return why a stack is not updated inside."""
    if not isinstance(leaf.parameter, Parameter):
        return "float"
    if not leaf.is_fused:
        return "not of these formats"
    names = [name for name in dict.fromkeys(readers) if name != _SLOT]
    by = f", it is read by {', '.join(names)}" if names else ""
    return f"no scan runs over it{by}"


def _check_alike(leaf: Leaf, index: "_Uses", zero: "_Uses") -> None:
    """Raise `TypeError` if the loss changes some arrays of a stored weight.

    Arithmetic on all of them raises by their keys. Code that moves a weight moves all
    of its arrays.
    """
    apart = set(index.others) ^ set(zero.others)
    if "stop_gradient" in zero.others:  # It may leave integers out.
        apart -= {"stop_gradient", _SLOT}
    if apart:
        found = sorted(apart - {_SLOT}) or ["other values"]
        raise TypeError(
            f"the loss changes some arrays of the stored weight {'/'.join(leaf.names)}"
            f" ({', '.join(found)}), such as by jax.tree.map over those of floats, but"
            f" codes and scales are not numbers: {ORDINARY}"
        )


@dataclass
class _Uses:
    """How often scans run over an array, and which other equations read it."""

    scans: int = 0
    others: tuple[str, ...] = ()


def _find_uses(jaxpr: core.Jaxpr, uses: dict[core.Var, _Uses]) -> None:
    """Add the uses of variables in a program, and the variables that equal them."""
    for eqn in jaxpr.eqns:
        body = _body(eqn)
        for place, var in enumerate(eqn.invars):
            if isinstance(var, core.Literal) or var not in uses:
                continue
            use = uses[var]
            name = eqn.primitive.name
            if eqn.params.get("name") == _SLOT:
                name = _SLOT
            if body is None:
                use.others += (name,)
                continue
            inner = body.invars[place]
            if name == "scan" and _rank(inner) == _rank(var):
                use.others += ("the carry or the constants of a scan",)
                continue
            use.scans += name == "scan"
            _find_uses(body, {inner: use})
            # A body may hand the array on, as nnx.scan returns its layers.
            for result, after in zip(body.outvars, eqn.outvars, strict=True):
                if result is inner:
                    uses[after] = use


def _rank(var: core.Var) -> int:
    return len(getattr(var.aval, "shape", ()))


def _body(eqn: core.JaxprEqn) -> core.Jaxpr | None:
    """Return the program that an equation runs on its own operands, or None."""
    if eqn.primitive.name == "while":  # two programs, which run often
        return None
    for value in eqn.params.values():
        jaxpr = getattr(value, "jaxpr", value)
        if isinstance(jaxpr, core.Jaxpr) and len(jaxpr.invars) == len(eqn.invars):
            return jaxpr
    return None


def _read_elsewhere(leaf: Leaf, use: _Uses, home: _Shapes) -> str:
    readers = [name for name in use.others if name != _SLOT]
    uses = use.others.count(_SLOT)
    if uses > 1:
        readers.append(f"{uses} parts of a layer")
    if home.is_read_whole:
        readers.append("code that reads the whole stack")
    if use.scans > 1:
        readers.append(f"{use.scans} scans")
    return (
        f"a scan runs over the stored stack {'/'.join(leaf.names)}"
        f" {list(leaf.parameter.shape)}, whose layers are updated inside the backward"
        f" pass, but it is also read by {', '.join(readers)}: the update would come"
        " before the last gradient; read it in one place of one scan, or take the"
        " ordinary step (value_and_grad, update, apply_updates)"
    )
