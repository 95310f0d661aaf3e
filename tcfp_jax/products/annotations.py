"""Annotations: names in a traced program that say where products are.

A product of ours is FP8 operands and a custom derivative, and a jaxpr does not show
that they are one product. So three identity functions pass an array through
`checkpoint_name` with a name that stands for the product:

    mark    on the kernel of a layer; the census of a model reads the kernel's layout
            and the recipe from it
    site    on the result inside the custom derivative; the monitor reads recipe,
            operands and shapes from it
    head    on the mean of `losses.cross_entropy`, inside its custom derivative; a
            conversion reads its options from it

A name costs nothing: it is gone when the program is lowered. Differentiated programs
have a rule instead of the body.
"""

from typing import Any, NamedTuple, TypeVar

import jax
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.derivatives import not_differentiated
from tcfp_jax.recipes import Recipe
from tcfp_jax.weights.layout import Layout

# Names for remat policies, e.g.
# jax.checkpoint_policies.save_only_these_names(WEIGHT_NAME, ACTIVATION_NAME). A policy
# without them runs the quantization again in the backward pass.
WEIGHT_NAME = "tcfp_weight"
ACTIVATION_NAME = "tcfp_activation"
_PREFIX = "tcfp_product_"
_TWICE = (
    "a second derivative of a product in low precision is asked for (a gradient of"
    " gradients, a Hessian): the gradient is that of rounded operands, and rounding"
    " has no derivative of its own, so terms would silently be zero; use"
    ' recipe("bf16") for the products that are differentiated twice'
)
_T = TypeVar("_T")


class Mark(NamedTuple):
    """A product that a layer is about to compute: its kernel's layout, its recipe, and
    rows of x for each matrix.
    """

    layout: Layout
    recipe: Recipe
    rows: int


class Site(NamedTuple):
    """A product: its recipe, and the tree and the shapes of its operands.

    The operands are `(x, w, quantized, x_quantized)` of `products.matmul`, and the
    words of FP4 training's key or the sizes of a grouped product's groups.
    """

    recipe: Recipe
    structure: jax.tree_util.PyTreeDef
    shapes: tuple[tuple[int, ...], ...]


class _Head(NamedTuple):
    """A product together with its cross entropy, of these `losses.Loss`."""

    options: Any


_Annotation = Mark | Site | _Head
# Equal products share a number, so equal programs stay equal and annotations add
# nothing to the caches of jit.
_ANNOTATIONS: list[_Annotation] = []
_NUMBERS: dict[_Annotation, int] = {}


def _annotated(x: Array, annotation: _Annotation) -> Array:
    number = _NUMBERS.setdefault(annotation, len(_ANNOTATIONS))
    if number == len(_ANNOTATIONS):
        _ANNOTATIONS.append(annotation)
    return checkpoint_name(x, f"{_PREFIX}{number}")


def mark(kernel: Array, layout: Layout, recipe: Recipe, rows: int) -> Array:
    """Return the kernel itself, annotated with the product that reads it.

    >>> marks = lambda w: mark(w, Layout((0,), (1,)), Recipe(), 8)
    >>> program = jax.make_jaxpr(marks)(jax.numpy.ones((4, 2)))
    >>> marked(program.eqns[0].params["name"]).rows
    8
    """
    return _annotated(kernel, Mark(layout, recipe, rows))


def marked(name: str) -> Mark | None:
    """Return the mark that a name in a program stands for, or None."""
    found = _annotation_of(name)
    return found if isinstance(found, Mark) else None


def site(
    result: Array,
    recipe: Recipe,
    operands: tuple[object, ...],
    words: Array | None = None,
) -> Array:
    """Return the result itself, annotated with the product that made it.

    >>> from tcfp_jax.recipes import recipe
    >>> of_itself = lambda y: site(y, recipe("bf16"), (y, y, None, None))
    >>> program = jax.make_jaxpr(of_itself)(jax.numpy.ones(2))
    >>> site_of(program).recipe == recipe("bf16"), site_of(jax.make_jaxpr(abs)(1.0))
    (True, None)
    """
    leaves, structure = jax.tree.flatten((*operands, words))
    return _annotated(
        result, Site(recipe, structure, tuple(leaf.shape for leaf in leaves))
    )


def site_of(program: Any) -> Site | None:
    """Return the product that a program, a jaxpr or a closed one, computes, or None."""
    return _last(program, Site)


def head(mean: Array, options: Any) -> Array:
    """Return the mean itself, annotated with the options of the cross entropy that made
    it.
    """
    return _annotated(mean, _Head(options))


def head_of(program: Any) -> Any:
    """Return the options of the cross entropy that a program computes, or None.

    >>> head_of(jax.make_jaxpr(lambda mean: head(mean, "options"))(1.0))
    'options'
    >>> head_of(jax.make_jaxpr(abs)(1.0)) is None
    True
    """
    found = _last(program, _Head)
    return None if found is None else found.options


def _last(program: Any, kind: type[_T]) -> _T | None:
    for eqn in reversed(getattr(program, "jaxpr", program).eqns):
        if eqn.primitive.name == "name":
            found = _annotation_of(eqn.params["name"])
            if isinstance(found, kind):
                return found
    return None


def _annotation_of(name: str) -> _Annotation | None:
    if not name.startswith(_PREFIX):
        return None
    return _ANNOTATIONS[int(name.removeprefix(_PREFIX))]


def differentiated_once(operands: _T) -> _T:
    """Return the operands of a derivative's rule; raise a TypeError if they are
    differentiated again.

    A rule rounds, and rounding has a derivative of zero almost everywhere. A second
    derivative, such as that of a penalty on gradients, would lose these terms silently.
    """
    return not_differentiated(_TWICE, operands)
