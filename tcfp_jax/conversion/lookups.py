"""Lookups: gathers of rows of a table, described as products."""

import math

from tcfp_jax.conversion.factors import Product
from tcfp_jax.conversion.views import Equation, View
from tcfp_jax.weights.layout import Layout


def lookup_of(eqn: Equation, path: str, view: View, inside: str) -> Product:
    """Return a gather from a view as a product of one-hot rows.

    It contracts the first axis that is looked up.
    """
    wanted: list[int] = []
    for axis in eqn.params["dimension_numbers"].start_index_map:
        wanted += [view.origin[atom] for atom in view.axes[axis]]
    rest = [axis for axis in range(len(view.shape)) if axis not in view.taken]
    first = wanted[0] if wanted else rest[0]
    rest.remove(first)
    layout = Layout((first,), tuple(rest), view.taken) if rest else None
    return Product(
        path,
        view.shape,
        "gather",
        k=view.shape[first],
        n=math.prod(view.shape[axis] for axis in rest),
        rows=math.prod(eqn.invars[1].aval.shape[:-1]),
        scope=str(eqn.source_info.name_stack),
        reason=inside or _lookup_refusal(eqn, view, layout),
        layout=layout,
    )


def _lookup_refusal(eqn: Equation, view: View, layout: Layout | None) -> str:
    """Return why rows cannot come from the stored form of their table, or ""."""
    if not view.whole:
        return "a part of the table is looked up, which has no stored form"
    fill = eqn.params["fill_value"]
    is_number = fill is not None and fill == fill  # not NaN
    if is_number and fill != 0:
        return f"rows out of range are {fill}, which is neither NaN nor zero"
    return "" if layout else "numbers are looked up, not rows"
