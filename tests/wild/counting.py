"""Products of parameters in a program, counted by taint, as an independent check of the
report of conversion.

It uses no code of the library. A program (a jaxpr) is walked once for every call site.
Every value carries two facts: the parameters behind it, and whether it depends on an
input. A product of a parameter has one operand that comes from parameters alone, and
one that comes from an input. It needs no axes, layouts or layer types.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal

PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general")
# Primitives that rearrange, round or cut an array, and compute no new values.
SHOWS = (
    "reshape",
    "transpose",
    "squeeze",
    "expand_dims",
    "broadcast_in_dim",
    "convert_element_type",
    "slice",
    "copy",
    "copy_p",
    "dynamic_slice",
    "stop_gradient",
    "sharding_constraint",
    "reshard",
    "name",
    "optimization_barrier",
    "device_put",
    "mesh_cast",
    "pvary",
    "split",
    "rev",
    "layout_constraint",
)


@dataclass(frozen=True)
class Taint:
    """The origin of a value.

    Attributes:
      parameters: Paths of the parameters behind it.
      of_input: If it depends on an input.
      multiplied: If a product of parameters took part.
    """

    parameters: frozenset[str] = frozenset()
    of_input: bool = False
    multiplied: bool = False


@dataclass(frozen=True)
class Counted:
    """One product of a parameter.

    Attributes:
      paths: Paths of the parameters behind its weight.
      primitive: Name of the equation's primitive; "float8" for a whole product in low
        precision.
      shapes: Shapes of the weight and of the other operand in the equation.
      inside: Names of the higher-order primitives around it, outermost first.
      multiplied: If the weight is a product of parameters, such as of latents.
      contracts: If anything is summed; a norm's scale in an einsum sums nothing.
    """

    paths: frozenset[str]
    primitive: str
    shapes: tuple[tuple[int, ...], ...]
    inside: tuple[str, ...] = ()
    multiplied: bool = False
    contracts: bool = True

    @property
    def pays(self) -> bool:
        """If `transform` converts it: `parameter x input`, summed, outside of the
        user's own rules.
        """
        own_rule = any(
            name.startswith(("custom_", "shard_map", "pallas")) for name in self.inside
        )
        return (
            self.primitive == "dot_general"
            and self.contracts
            and not self.multiplied
            and not own_rule
        )


def name_of(path: Any) -> str:
    """Return `a/b/0` for a path of keys."""
    return jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value")


def count(fn: Callable[..., Any], params: Any, *inputs: Any) -> list[Counted]:
    """Return every product of parameters in `fn(params, *inputs)`, in the order of the
    program.

    Args:
      fn: Any function.
      params: Tree of trained arrays.
      inputs: Further arguments; values in them that are not arrays are passed
        unchanged.

    Returns:
      The records. Values that `fn` closes over are constants, neither parameter nor
        input.
    """
    arrays, structure = jax.tree.flatten((params, *inputs))
    traced = [
        isinstance(leaf, jax.typing.ArrayLike) and not isinstance(leaf, (bool, str))
        for leaf in arrays
    ]

    def flat(*values: Any) -> Any:
        given = iter(values)
        leaves = [
            next(given) if is_array else leaf
            for leaf, is_array in zip(arrays, traced, strict=True)
        ]
        return fn(*jax.tree.unflatten(structure, leaves))

    closed = jax.make_jaxpr(flat)(
        *[leaf for leaf, is_array in zip(arrays, traced, strict=True) if is_array]
    )
    paths = [name_of(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    of_inputs = [Taint(of_input=True)] * (len(arrays) - len(paths))
    taints = [Taint(frozenset([path])) for path in paths] + of_inputs
    given = [taint for taint, is_array in zip(taints, traced, strict=True) if is_array]
    records: list[Counted] = []
    _walk(closed.jaxpr, [Taint()] * len(closed.consts), given, (), records.append)
    return records


def float8_products(records: Iterable[Counted]) -> list[Counted]:
    """Return the products of a transformed program that run in low precision."""
    return [record for record in records if record.primitive == "float8"]


def dots_of_float8(jaxpr: Any) -> tuple[int, int]:
    """Return the numbers of `dot_general` equations of a program that read two FP8
    operands, and that do not.
    """
    narrow = wide = 0
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        if equation.primitive.name == "dot_general":
            is_narrow = all(_is_float8(operand.aval) for operand in equation.invars)
            narrow = narrow + is_narrow
            wide = wide + (not is_narrow)
        for inner in _bodies(equation):
            parts = dots_of_float8(inner)
            narrow = narrow + parts[0]
            wide = wide + parts[1]
    return narrow, wide


def mentions_float8(jaxpr: Any) -> bool:
    """Return whether any value of the program is FP8."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    return any(
        _is_float8(variable.aval) for variable in [*jaxpr.invars, *jaxpr.constvars]
    ) or any(
        any(_is_float8(variable.aval) for variable in equation.outvars)
        or any(map(mentions_float8, _bodies(equation)))
        for equation in jaxpr.eqns
    )


def _is_float8(aval: Any) -> bool:
    dtype = getattr(aval, "dtype", None)
    return (
        dtype is not None
        and jnp.issubdtype(dtype, jnp.floating)
        and jnp.dtype(dtype).itemsize == 1
    )


def _bodies(equation: Any) -> list[Any]:
    """Return the programs inside an equation."""
    values = [
        leaf
        for value in equation.params.values()
        for leaf in (value if isinstance(value, tuple) else (value,))
    ]
    return [
        value
        for value in values
        if isinstance(value, ClosedJaxpr) or hasattr(value, "eqns")
    ]


def _union(taints: Iterable[Taint], multiplied: bool = False) -> Taint:
    taints = list(taints)
    return Taint(
        frozenset().union(*(taint.parameters for taint in taints)),
        any(taint.of_input for taint in taints),
        multiplied or any(taint.multiplied for taint in taints),
    )


Note = Callable[[Counted], None]


def _walk(
    jaxpr: Any,
    consts: list[Taint],
    given: list[Taint],
    inside: tuple[str, ...],
    note: Note,
) -> list[Taint]:
    """Return the taints of the results, and note every product."""
    known: dict[Any, Taint] = dict(zip(jaxpr.constvars, consts, strict=True))
    known.update(zip(jaxpr.invars, given, strict=True))

    def read(variable: Any) -> Taint:
        return Taint() if isinstance(variable, Literal) else known[variable]

    for equation in jaxpr.eqns:
        taints = [read(variable) for variable in equation.invars]
        known.update(
            zip(equation.outvars, _through(equation, taints, inside, note), strict=True)
        )
    return [read(variable) for variable in jaxpr.outvars]


def _through(
    equation: Any, taints: list[Taint], inside: tuple[str, ...], note: Note
) -> list[Taint]:
    name = equation.primitive.name
    if name in PRODUCTS:
        _note_product(equation, taints, inside, note)
    if name in ("dynamic_slice", "gather"):
        # Indices are not part of the values. But an input chooses a looked-up row,
        # which therefore depends on it.
        source = taints[0] if name == "dynamic_slice" else _union(taints)
        return [source] * len(equation.outvars)
    if name in SHOWS:
        return [_union(taints[:1])] * len(equation.outvars)
    bodies = _bodies(equation)
    if name.startswith("custom_vjp") and any(map(mentions_float8, bodies)):
        whole = _union(taints)
        note(
            Counted(
                whole.parameters,
                "float8",
                tuple(v.aval.shape for v in equation.invars),
                inside,
            )
        )
        return [whole] * len(equation.outvars)
    if name == "scan":
        return _scan(equation, taints, (*inside, name), note)
    if name == "while":
        return _while(equation, taints, (*inside, name), note)
    if name == "cond":
        branches = [
            _enter(body, taints[1:], (*inside, name), note)
            for body in equation.params["branches"]
        ]
        return [_union(each) for each in zip(*branches, strict=True)]
    fitting = [
        body
        for body in bodies
        if len(getattr(body, "jaxpr", body).invars) == len(taints)
    ]
    if fitting and name != "pallas_call":
        return _enter(fitting[0], taints, (*inside, name), note)
    joined = _union(taints, name in PRODUCTS)
    size = equation.outvars[0].aval.size
    for variable, taint in zip(equation.invars, taints, strict=True):
        # W / norm of a product: W itself is none
        is_whole = taint.parameters and variable.aval.size == size
        if is_whole and not taint.multiplied and name not in PRODUCTS:
            joined = replace(joined, multiplied=False)
    return [joined] * len(equation.outvars)


def _enter(
    body: Any, taints: list[Taint], inside: tuple[str, ...], note: Note
) -> list[Taint]:
    jaxpr = getattr(body, "jaxpr", body)
    # A call counts in the same place whether it is inlined or not.
    shown = (
        inside[:-1]
        if inside[-1] in ("jit", "pjit", "closed_call", "core_call")
        else inside
    )
    return _walk(jaxpr, [Taint()] * len(jaxpr.constvars), taints, shown, note)


def _settle(
    step: Callable[[list[Taint], Note], list[Taint]], carry: list[Taint], note: Note
) -> list[Taint]:
    """Run a loop's body on the carry until its taints no longer change; note products
    once.
    """
    while True:
        after = [
            _union(pair) if pair[0] != pair[1] else pair[0]
            for pair in zip(carry, step(carry, lambda record: None), strict=True)
        ]
        if after == carry:
            break
        carry = after
    step(carry, note)
    return carry


def _scan(
    equation: Any, taints: list[Taint], inside: tuple[str, ...], note: Note
) -> list[Taint]:
    body = equation.params["jaxpr"]
    consts, carries = scan_counts(equation)
    outputs: list[Taint] = []

    def step(carry: list[Taint], note: Note) -> list[Taint]:
        results = _enter(
            body, [*taints[:consts], *carry, *taints[consts + carries :]], inside, note
        )
        outputs[:] = results[carries:]
        return results[:carries]

    return [*_settle(step, taints[consts : consts + carries], note), *outputs]


def scan_counts(equation: Any) -> tuple[int, int]:
    """Return the numbers of constants and carried values; jax 0.12 may keep them as a
    tree of flags.
    """
    if "num_consts" in equation.params:
        return equation.params["num_consts"], equation.params["num_carry"]
    split = equation.params["ft_in"].unpack()
    return len(list(split[0])), len(list(split[1]))


def _while(
    equation: Any, taints: list[Taint], inside: tuple[str, ...], note: Note
) -> list[Taint]:
    params = equation.params
    of_cond = params["cond_nconsts"]
    of_body = params["body_nconsts"]
    cond_consts = taints[:of_cond]
    body_consts = taints[of_cond : of_cond + of_body]

    def step(carry: list[Taint], note: Note) -> list[Taint]:
        _enter(params["cond_jaxpr"], [*cond_consts, *carry], inside, note)
        return _enter(params["body_jaxpr"], [*body_consts, *carry], inside, note)

    return _settle(step, taints[of_cond + of_body :], note)


def _note_product(
    equation: Any, taints: list[Taint], inside: tuple[str, ...], note: Note
) -> None:
    sides = [
        (taints[0], taints[1], equation.invars[:2]),
        (taints[1], taints[0], equation.invars[1::-1]),
    ]
    for weight, other, variables in sides:
        if weight.parameters and not weight.of_input and other.of_input:
            contracted = True
            if equation.primitive.name == "dot_general":
                contracted = bool(equation.params["dimension_numbers"][0][0])
            shapes = tuple(variable.aval.shape for variable in variables)
            record = Counted(
                weight.parameters,
                equation.primitive.name,
                shapes,
                inside,
                weight.multiplied,
            )
            note(replace(record, contracts=contracted))
