"""Products of BF16 operands, whose sums are float32 on every platform."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.typing import DTypeLike

from pallas_kernels.dispatch import note
from pallas_kernels.partition import partitioned
from pallas_kernels.specs import Sharding, entries, sharding_of, with_entries
from pallas_kernels.tuning import Key
from pallas_kernels.wire import Scatter, Wire, reduced
from tcfp_jax.products.annotations import ACTIVATION_NAME, site
from tcfp_jax.recipes import Halves, Recipe
from tcfp_jax.weights.stored import Stored


def dot(
    a: Array,
    b: Array,
    a_axes: tuple[int, ...],
    b_axes: tuple[int, ...],
    dtype: DTypeLike,
    sharding: Sharding = None,
) -> Array:
    """Return the product over some axes of each operand, rounded to BF16, in `dtype`.

    Sums are float32. `sharding` is that of the result, as in `lax.dot_general`.

    >>> a, b = jnp.ones((2, 3), jnp.bfloat16), jnp.ones((3, 1), jnp.bfloat16)
    >>> dot(a, b, (1,), (0,), jnp.float32).tolist()
    [[3.0], [3.0]]
    """
    a = a.astype(jnp.bfloat16)
    b = b.astype(jnp.bfloat16)
    k = math.prod(a.shape[axis] for axis in a_axes)
    # Not by division, because `jax.export` may leave sizes open.
    m = math.prod(a.shape[i] for i in range(a.ndim) if i not in a_axes)
    n = math.prod(b.shape[i] for i in range(b.ndim) if i not in b_axes)
    # A BF16 result comes straight from the product; a cast of a float32 one would be a
    # pass over it.
    product_dtype = jnp.bfloat16 if dtype == jnp.bfloat16 else jnp.float32
    note(Key("dot_general", str(jnp.dtype(product_dtype)), (m, k, n)), a, b)

    product = functools.partial(
        lax.dot_general,
        dimension_numbers=((a_axes, b_axes), ((), ())),
        preferred_element_type=product_dtype,
        out_sharding=sharding,
    )

    def widened(a: Array, b: Array) -> Array:
        # The barrier keeps XLA from deleting a cast to bfloat16 and back.
        a, b = lax.optimization_barrier((a, b))
        return product(a.astype(jnp.float32), b.astype(jnp.float32))

    # XLA's CPU casts the operands of most such products itself (jaxlib 0.10 to 0.11).
    # It cannot run one that contracts the first axes of both and transposes its result,
    # which `jax.vmap` over the second operand alone makes. Only for these weight
    # gradients, whose bits it does not change; in other products it would change the
    # order of sums.
    by_first = product_dtype == jnp.float32 and a_axes[0] == b_axes[0] == 0
    if by_first:
        y = lax.platform_dependent(a, b, cpu=widened, default=product)
    else:
        y = product(a, b)
    return y.astype(dtype)


def weight(weight: Array | Stored, halves: Halves) -> Array:
    """Return a weight, or some halves of its stored form, as BF16 products read it."""
    if not isinstance(weight, Stored):
        return weight.astype(jnp.bfloat16)
    if halves == "hi":
        weight = weight.drop_residual()
    # FP8 times a power of two is exact in BF16; hi + lo is summed in float32 and
    # rounded once.
    return weight.dequantize(jnp.bfloat16)


def weight_gradient(
    x: Array, g: Array, dtype: DTypeLike, sharding: Sharding, wire: Wire
) -> Array:
    """Return `xᵀ g` of x `[*m, k]` and g `[*m, n]`, as `[k, n]`; devices send partial
    sums as `wire` says.
    """

    def local(
        x: Array,
        g: Array,
        *,
        summed_over: tuple[str, ...],
        scattered: Sequence[Scatter] = (),
    ) -> Any:
        out = lax.dot_general(
            x, g, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32
        )
        return reduced(out, scattered, summed_over, wire).astype(dtype)

    wanted = None if sharding is None else entries(sharding, 2)
    call = partitioned(
        local,
        "m k, m n -> k n",
        scattered=True,
        merged={"m": x.shape[:-1]},
        wanted=wanted,
    )
    return call(x.astype(jnp.bfloat16), g.astype(jnp.bfloat16))


# x and w; a tangent may be a symbolic zero
_Pair: TypeAlias = tuple[Array, Array]
_Axes: TypeAlias = tuple[int | None, int | None]
_Mapped: TypeAlias = tuple[_Axes, ...]


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def product(recipe: Recipe, sharding: Sharding, x: Array, w: Array) -> Array:
    """Return `x @ w` of floats `[..., k]` and `[k, n]` in the dtype of x; it has
    derivatives in both modes.

    JAX's own transpose of the product would multiply float32 gradients. Here the
    backward pass has BF16 operands, too.

    >>> from tcfp_jax.recipes import recipe
    >>> of_x = lambda x: product(recipe("bf16"), None, x, jnp.ones((2, 1)))
    >>> jax.jvp(of_x, (jnp.ones((1, 2)),), (jnp.full((1, 2), 0.25),))[1].tolist()
    [[0.5]]
    """
    with jax.named_scope("forward"):
        y = dot(x, w, (x.ndim - 1,), (0,), x.dtype, sharding)
    return site(y, recipe, (x, w, None, None))


@functools.partial(product.defjvp, symbolic_zeros=True)
def _jvp(recipe: Recipe, sharding: Sharding, primals: _Pair, tangents: _Pair) -> _Pair:
    x, w = primals
    dx, dw = tangents
    y = product(recipe, sharding, x, w)
    parts = []
    linear = functools.partial(
        _linear.bind, dtype=y.dtype, sharding=sharding, wire=recipe.wire, mapped=()
    )
    if not isinstance(dw, SymbolicZero):
        # The backward pass keeps x in two bytes per value.
        kept = checkpoint_name(x.astype(jnp.bfloat16), ACTIVATION_NAME)
        parts.append(linear(kept, dw))
    if not isinstance(dx, SymbolicZero):
        parts.append(linear(dx, w))
    return y, functools.reduce(jnp.add, parts) if parts else jnp.zeros_like(y)


# The product as JAX differentiates it: linear in each operand. `mapped` has each
# `jax.vmap`'s in_axes, from the inside.
_linear = Primitive("bf16_product")


def _computed(
    x: Array,
    w: Array,
    *,
    dtype: DTypeLike,
    sharding: Sharding,
    wire: Wire | None,
    mapped: _Mapped,
) -> Array:
    def one(x: Array, w: Array) -> Array:
        y = lax.dot_general(
            x.astype(jnp.bfloat16),
            w.astype(jnp.bfloat16),
            (((x.ndim - 1,), (0,)), ((), ())),
            preferred_element_type=(
                jnp.bfloat16 if dtype == jnp.bfloat16 else jnp.float32
            ),
            out_sharding=sharding,
        )
        return y.astype(dtype)

    for in_axes in mapped:
        one = jax.vmap(one, in_axes)
    return one(x, w)


def _dgrad(
    g: Array, x: ad.UndefinedPrimal, w: Array, *, mapped: _Mapped, **_: object
) -> Array:
    def one(g: Array, w: Array) -> Array:
        return dot(g, w, (g.ndim - 1,), (1,), x.aval.dtype, sharding)

    sharding = _sharding_of_one(x.aval, [of_x for of_x, _ in mapped])
    with jax.named_scope("dgrad"):
        return _of_all(one, tuple((of_w, of_x) for of_x, of_w in mapped))(g, w)


def _wgrad(
    g: Array,
    x: Array,
    w: ad.UndefinedPrimal,
    *,
    wire: Wire | None,
    mapped: _Mapped,
    **_: object,
) -> Array:
    def one(g: Array, x: Array) -> Array:
        if wire is not None:
            return weight_gradient(x, g, w.aval.dtype, sharding, wire)
        tokens = tuple(range(g.ndim - 1))
        return dot(x, g, tokens, tokens, w.aval.dtype, sharding)

    sharding = _sharding_of_one(w.aval, [of_w for _, of_w in mapped])
    with jax.named_scope("wgrad"):
        return _of_all(one, mapped)(g, x)


def _sharding_of_one(
    aval: jax.core.ShapedArray, axes: Sequence[int | None]
) -> Sharding:
    """Return the sharding of an operand without the axes that each `jax.vmap` maps, the
    innermost first.
    """
    sharding = sharding_of(aval)
    if sharding is None:
        return None
    spec = list(entries(sharding, aval.ndim))
    for axis in reversed(axes):
        if axis is not None:
            del spec[axis]
    return with_entries(sharding, spec)


def _of_all(one: Callable[..., Array], mapped: _Mapped) -> Callable[..., Array]:
    """Return a gradient under each `jax.vmap`, by the axes of (the known operand, the
    one of the gradient).
    """
    for known, own in mapped:
        each = jax.vmap(one, (0, known), 0 if own is None else own)
        # Products that share an operand add their gradients.
        one = each if own is not None else functools.partial(_summed, each)
    return one


def _summed(each: Callable[..., Array], *arrays: Array) -> Array:
    return each(*arrays).sum(0)


def _batched(
    operands: _Pair, axes: _Axes, *, mapped: _Mapped, **options: object
) -> tuple[Array, int]:
    return _linear.bind(*operands, mapped=(*mapped, tuple(axes)), **options), 0


_linear.def_impl(
    jax.jit(_computed, static_argnames=("dtype", "sharding", "wire", "mapped"))
)
# A traced type knows the sharding and the varying axes of the result.
_linear.def_abstract_eval(
    lambda *types, **o: jax.make_jaxpr(functools.partial(_computed, **o))(
        *types
    ).out_avals[0]
)
ad.defbilinear(_linear, _dgrad, _wgrad)
batching.primitive_batchers[_linear] = _batched
mlir.register_lowering(_linear, mlir.lower_fun(_computed, multiple_results=False))
