"""Scales that several weights share, and the traps of a global scale that is a divisor.

Engines multiply q, k and v, or gate and up, as one matrix with one global scale. vLLM
takes the largest of the scales that a file has and multiplies every part by it, without
a warning, so parts that were quantized apart come out wrong.
"""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.fp4 import E2M1
from pallas_kernels.operands import Fp4, Operand, Scaling, Tensor
from pallas_kernels.quantize.api import quantize as quantize_values
from tcfp_jax.formats.scale_rules import IN_E4M3
from tcfp_jax.weights.fp4_packing import quantize_fp4
from tcfp_jax.weights.layout import Weight
from tcfp_jax.weights.stored import Stored

# Layers that engines multiply as one matrix, by the last part of the names of their
# modules.
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_SIGNS = np.uint8(0x88)  # sign bits of the two codes in a byte

# For each scale byte, whether E4M3 holds its products with all codes; a NaN stays NaN.
_SCALES = np.arange(256, dtype=np.uint8).view(jnp.float8_e4m3fn).astype(np.float32)
_PRODUCTS = np.multiply.outer(_SCALES, E2M1) * np.float32(IN_E4M3)
_HELD = (_PRODUCTS.astype(jnp.float8_e4m3fn).astype(np.float32) == _PRODUCTS).all(
    axis=1
) | np.isnan(_SCALES)

# Weights of a model
# --------------------------------------------------------------------------------------


def quantize_together(
    weights: Mapping[str, jax.Array],
    scaling: Scaling,
    quantize: Callable[[jax.Array], Operand] | None = None,
) -> dict[str, Operand]:
    """Quantize weights as one matrix, so that they share the scale that a matrix has
    once.

    Use this for layers that an engine multiplies as one matrix.

    Args:
      weights: real floats `[..., n, k]` of any n, contracted along k.
      scaling: `Fp4(...)`, which gives all NVFP4 operands one `outer`, or an FP8 scaling
        of `pallas_kernels.operands`.
      quantize: quantizes all rows, `[..., n, k]`, instead of the scaling's own rule.

    Raises:
      ValueError: there are no weights, they differ in more than n, or squares would lie
        across two weights.

    >>> both = quantize_together({"gate": jnp.ones((2, 16)), "up": jnp.full((3, 16), 8.0)}, Fp4())
    >>> both["gate"].shape, both["up"].shape, bool(both["gate"].outer == both["up"].outer)
    ((2, 16), (3, 16), True)
    """
    shapes = {name: tuple(w.shape) for name, w in weights.items()}
    if (
        len({(*shape[:-2], *shape[-1:]) for shape in shapes.values()}) != 1
        or min(map(len, shapes.values())) < 2
    ):
        raise ValueError(
            f"the weights are {shapes}; pass matrices [..., n, k] that differ in n"
            " alone"
        )
    rows = [shape[-2] for shape in shapes.values()]
    square = getattr(scaling, "tile", "vector") == "square"
    side = (
        (scaling.block if isinstance(scaling, Fp4) else getattr(scaling, "size", 1))
        if square
        else 1
    )
    if any(n % side for n in rows[:-1]):
        raise ValueError(
            f"the weights are {shapes}, and {scaling} would lie across two of them; use"
            " vectors"
        )
    parts = list(weights.values())
    whole = (
        quantize(jnp.concatenate(parts, -2))
        if quantize
        else _quantized(scaling, *parts)
    )
    ends = np.cumsum(rows)
    return {
        name: _rows(whole, end - n, end, side)
        for name, n, end in zip(weights, rows, ends, strict=True)
    }


def store_together(
    stored: Iterable[str],
    leaves: Mapping[str, jax.Array],
    weights: Mapping[str, Weight],
    fused: Sequence[Sequence[str]],
    choose: Callable[[str, jax.Array], Operand] | None = None,
) -> dict[str, Stored]:
    """Store FP4 weights; those that are multiplied as one matrix have one `outer`.

    `stored` has the paths of the weights; `leaves` and `weights` are by path, and
    `fused` and `choose` as in `choose_codes`. Without `choose` the recipe's rule
    quantizes, and weights that are multiplied alone are left out.

    Raises:
      ValueError: k is odd, recipes differ, a chosen operand does not fit, no weight is
        called by any name of a group, or FP8 products could not rely on its rule as the
        recipe does; or `quantize_together` raises it.
    """
    made: dict[str, Stored] = {}
    for family in _families(stored, fused):
        if choose is not None or len(family) > 1:
            made |= _store_family(family, leaves, weights, choose)
    return made


def _families(
    weights: Iterable[str], fused: Sequence[Sequence[str]]
) -> list[list[str]]:
    """Return the paths of weights in lists: those that are multiplied as one matrix
    together, each other one alone.
    """
    found: dict[Hashable, list[str]] = {}
    groups, met = [tuple(group) for group in fused], set()
    for path in weights:
        parts = path.split("/")
        places = (
            (group, at)
            for group in groups
            for at in (1, 2)
            if at <= len(parts) and parts[-at] in group
        )
        if (place := next(places, None)) is not None:
            group, at = place
            met.add(group)
            # Paths of one family differ in this name alone.
            found.setdefault(
                (group, *parts[:-at], "", *parts[len(parts) - at + 1 :]), []
            ).append(path)
        else:
            found[path] = [path]
    if missing := [group for group in groups if group not in met]:
        raise ValueError(
            f"fused has {missing[0]}, but the FP4 weights are {list(weights)[:8]}; use"
            " names of their layers"
        )
    return list(found.values())


def _store_family(
    family: Sequence[str],
    leaves: Mapping[str, jax.Array],
    weights: Mapping[str, Weight],
    choose: Callable[[str, jax.Array], Operand] | None,
) -> dict[str, Stored]:
    first, scaling = family[0], weights[family[0]].recipe.scaling
    if other := [path for path in family if weights[path].recipe.scaling != scaling]:
        raise ValueError(
            f"{first} is stored with {scaling} and {other[0]} otherwise; give them one"
            " recipe"
        )
    turned = {path: weights[path].layout.transposed for path in family}
    matrices = {
        path: weights[path].layout.matrix(leaves[path]).astype(jnp.float32)
        for path in family
    }
    matrices = {
        path: w if turned[path] else w.swapaxes(-1, -2) for path, w in matrices.items()
    }
    k = matrices[first].shape[-1]
    if k % 2:
        raise ValueError(
            f"{first} contracts k={k} values, which is odd; its codes can only be"
            " chosen by the rule"
        )

    def chosen(w: jax.Array) -> Operand:
        assert choose is not None, "the rule quantizes otherwise"
        made = choose(first, w)
        formats = [
            (one.format, one.tile) if isinstance(one, Fp4) else one
            for one in (made.scaling, scaling)
        ]
        if formats[0] != formats[1]:
            raise ValueError(
                f"{first} is stored with {scaling}, but its codes were chosen with"
                f" {made.scaling}; use one format"
            )
        if made.shape != w.shape:
            raise ValueError(
                f"the codes chosen for {first} are {list(made.shape)}, but it is"
                f" {list(w.shape)}"
            )
        asked, found = (getattr(one, "rule", None) for one in (scaling, made.scaling))
        if asked == "fold_exact" != found:
            raise ValueError(
                f"{first} is stored with {scaling}, whose FP8 products are exact, but"
                f" its codes were chosen with rule={found!r}; choose them with"
                f" rule={asked!r}, as gptq(w, hessian, {scaling}) and search_scales(w,"
                f" {scaling}) do, or give the recipe rule={found!r}"
            )
        check_rule(first, made, "choose codes by the rule that the operand names")
        return made  # with its own rule, which products follow instead of the recipe's

    made = quantize_together(matrices, scaling, None if choose is None else chosen)
    return {
        path: Stored(None, one) if turned[path] else Stored(one, None)
        for path, one in made.items()
    }


def check_rule(name: str, weight: Operand, repair: str) -> None:
    """Raise a ValueError if an operand names the rule "fold_exact" and its scales break
    it: FP8 products rely on it.

    By this rule E4M3 holds the product of each scale and code over 2**3. No product
    depends on the other rules. Operands are not looked at while they are traced or
    other processes hold a part. `repair` ends the message.
    """
    scale = weight.scale
    unknown = isinstance(scale, jax.core.Tracer) or not getattr(
        scale, "is_fully_addressable", True
    )
    if getattr(weight.scaling, "rule", None) != "fold_exact" or unknown:
        return
    share = _HELD[np.asarray(scale).view(np.uint8)].mean()
    if share < 1:
        raise ValueError(
            f"{name} has {weight.scaling}, but only {share:.1%} of its scales are of"
            f" that rule: FP8 products would round what the others multiply; {repair}"
        )


@functools.partial(jax.jit, static_argnums=0)
def _quantized(scaling: Scaling, *weights: jax.Array) -> Operand:
    w = jnp.concatenate(weights, axis=-2)
    if isinstance(scaling, Fp4):
        return quantize_fp4(w, scaling)
    quantized: Callable[[jax.Array], Operand] = lambda w: (
        quantize_values(w, jnp.float8_e4m3fn, scaling).rows
    )
    for _ in range(w.ndim - 2):
        quantized = jax.vmap(quantized)
    return quantized(w)


def _rows(whole: Operand, start: int, end: int, side: int) -> Operand:
    scale = whole.scale
    if not isinstance(whole.scaling, Tensor):
        scale = jax.lax.slice_in_dim(
            scale, start // side, -(-end // side), axis=len(whole.shape) - 2
        )
    return dataclasses.replace(
        whole, values=whole.values[..., start:end, :], scale=scale
    )


# Weights of a file
# --------------------------------------------------------------------------------------


def settle_families(
    weights: Mapping[str, Operand],
    schemes: Mapping[str, str],
    floats: Iterable[str],
    fused: Sequence[Sequence[str]],
) -> dict[str, Operand]:
    """Return the weights of a file; a weight of zeros gets a global scale that the file
    can hold.

    Any scale serves zeros, and engines want one scale for all weights that they
    multiply as one matrix. Without other weights it is 1, as in `quantize_fp4` and in
    `generate_gparam` of the compressed-tensors package.

    Args:
      weights: by the name of the module.
      schemes: descriptions of how they are stored, by the same names.
      floats: names of modules that stay float.
      fused: groups of last parts of names, whose modules engines multiply as one
        matrix.

    Raises:
      ValueError: two members of a group are stored differently, or have two values of
        `outer`.
    """

    def is_zero(weight: Operand) -> bool:
        """Return whether all values of an operand with an `outer` are zero, whatever
        its scales are; NaN is not.
        """
        if weight.outer is None or not np.isfinite(weight.outer):
            return False
        return float(weight.outer) == 0 or not np.any(
            np.asarray(weight.values) & ~_SIGNS
        )

    empty = {name for name, weight in weights.items() if is_zero(weight)}
    made = dict(weights)
    for name in sorted(empty):
        partners = [
            weights[other].outer
            for _, other in _siblings(name, fused)
            if other in weights.keys() - empty
        ]
        shared = next((outer for outer in partners if outer is not None), 1)
        changes: dict[str, Any] = dict(
            values=np.asarray(weights[name].values) & _SIGNS, outer=np.float32(shared)
        )
        made[name] = dataclasses.replace(weights[name], **changes)
    known = {**dict.fromkeys(floats, "float"), **schemes}
    outers = {
        name: float(weight.outer)
        for name, weight in made.items()
        if weight.outer is not None
    }
    for name, (group, sibling) in (
        (one, found) for one in made for found in _siblings(one, fused)
    ):
        if known.get(sibling, schemes[name]) != schemes[name]:
            raise ValueError(
                f"{name} is stored as {schemes[name]} and {sibling} as"
                f" {known[sibling]}, but engines multiply {list(group)} as one matrix;"
                " store them alike, or pass fused=() for an engine that does not"
            )
        if outers.get(sibling, outers.get(name)) != outers.get(name):
            raise ValueError(
                f"{name} has outer={outers[name]:.9g} and {sibling}"
                f" {outers[sibling]:.9g}, but engines multiply {list(group)} as one"
                " matrix with one global scale; quantize them as one: name your layers"
                " in fused= of quantize_params and choose_codes, or call"
                " quantize_together; or pass fused=() here for an engine that does not"
            )
    return made


def _siblings(
    name: str, fused: Sequence[Sequence[str]]
) -> Iterator[tuple[Sequence[str], str]]:
    """Yield (group, name of a member) of the modules that engines multiply as one
    matrix, `name` among them.
    """
    parent, _, last = name.rpartition(".")
    for group in fused:
        if last in group:
            yield from (
                (group, f"{parent}.{other}" if parent else other) for other in group
            )
