"""Reading jaxprs: what their equations hold, whichever version of jax wrote them."""

from collections.abc import Iterator
from typing import Any

PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general")
INLINED = ("jit", "pjit", "closed_call", "core_call", "remat2", "checkpoint", "remat")


def opened(body: Any) -> tuple[Any, Any]:
    """(the jaxpr of a body, its constants), whether it is closed or not."""
    return getattr(body, "jaxpr", body), getattr(body, "consts", ())


def bodies_of(eqn: Any) -> Iterator[tuple[Any, Any]]:
    """The programs that an equation holds, each with its constants."""
    for value in eqn.params.values():
        for one in value if isinstance(value, tuple | list) else (value,):
            body, consts = opened(one)
            if hasattr(body, "eqns") and hasattr(body, "invars"):
                yield body, consts


def scan_counts(params: Any) -> tuple[int, int]:
    """How many constants and carried values a scan has; jax 0.11 keeps flat trees of them instead of numbers."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(list(consts)), len(list(carry))


def multiplies(jaxpr: Any) -> bool:
    """Whether a program or a body in it has a product."""
    bodies = (body for eqn in jaxpr.eqns for body, _ in bodies_of(eqn))
    return any(eqn.primitive.name in PRODUCTS for eqn in jaxpr.eqns) or any(map(multiplies, bodies))


def inside_gradient(eqn: Any) -> str:
    """Why a product of a derivative is left alone, or "".

    A function that differentiates itself multiplies by parameters backward too, and those are not its forward products.
    """
    names = {getattr(entry, "name", "") for entry in eqn.source_info.name_stack.stack}
    if names & {"jvp", "transpose"}:
        return "inside jax.grad or jax.jvp; transform the function that is differentiated, and differentiate that"
    return ""


def has_rows(eqn: Any) -> bool:
    """Whether both operands have axes of their own: a sum of x times one-hot labels is a loss and not a product."""
    if eqn.primitive.name != "dot_general":
        return True
    contracted, batch = eqn.params["dimension_numbers"]
    return all(var.aval.ndim > len(c) + len(b) for var, c, b in zip(eqn.invars, contracted, batch, strict=True))


def sums(eqn: Any) -> bool:
    """Whether a product sums anything; `einsum("bslh,sh->bslh")` is a product and multiplies elements."""
    return eqn.primitive.name != "dot_general" or bool(eqn.params["dimension_numbers"][0][0])


def precision_of(eqn: Any) -> str:
    """The precision that a product's author asked for beyond the default, or ""."""
    asked = eqn.params.get("precision")
    named = asked if isinstance(asked, tuple | list) else (asked,)
    usual = (None, "DEFAULT")
    found = [getattr(one, "name", one) for one in named]
    return "" if all(one in usual or str(one).upper() == "DEFAULT" for one in found) else str(found[0])
