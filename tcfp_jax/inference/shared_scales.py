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
from jax import Array

from pallas_kernels.fp4 import E2M1
from pallas_kernels.operands import Fp4, Operand, Scaling, Tensor
from pallas_kernels.quantize.api import quantize as quantize_values
from tcfp_jax.formats.scale_rules import IN_E4M3
from tcfp_jax.weights.fp4_packing import quantize_fp4
from tcfp_jax.weights.layout import Weight
from tcfp_jax.weights.stored import Stored

Groups = Sequence[Sequence[str]]
Choose = Callable[[str, Array], Operand]
# Layers that engines multiply as one matrix, by the last part of the names of their
# modules.
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_SIGNS = np.uint8(0x88)  # sign bits of the two codes in a byte

# For each scale byte, whether E4M3 holds its products with all codes; a NaN stays NaN.
_SCALES = np.arange(256, dtype=np.uint8).view(jnp.float8_e4m3fn).astype(np.float32)
_PRODUCTS = np.multiply.outer(_SCALES, E2M1) * np.float32(IN_E4M3)
_ROUNDED = _PRODUCTS.astype(jnp.float8_e4m3fn).astype(np.float32)
_HELD = (_ROUNDED == _PRODUCTS).all(axis=1) | np.isnan(_SCALES)

# Weights of a model
# --------------------------------------------------------------------------------------


def quantize_together(
    weights: Mapping[str, Array],
    scaling: Scaling,
    quantize: Callable[[Array], Operand] | None = None,
) -> dict[str, Operand]:
    """Quantize weights as one matrix, so that they share the matrix's one scale.

    Use this for layers that an engine multiplies as one matrix. `quantize_params` and
    `choose_codes` do it by `fused=` for a model.

    Args:
      weights: real floats `[..., n, k]` of any n, contracted along k.
      scaling: `Fp4(...)`, which gives all NVFP4 operands one `outer`, or an FP8 scaling
        of `pallas_kernels.operands`.
      quantize: quantizes all rows, `[..., n, k]`, instead of the scaling's own rule.

    Raises:
      ValueError: there are no weights, they differ in more than n, or squares would lie
        across two weights.

    >>> weights = {"gate": jnp.ones((2, 16)), "up": jnp.full((3, 16), 8.0)}
    >>> both = quantize_together(weights, Fp4())
    >>> both["gate"].shape, both["up"].shape
    ((2, 16), (3, 16))
    >>> bool(both["gate"].outer == both["up"].outer)
    True
    """
    shapes = {name: tuple(w.shape) for name, w in weights.items()}
    others = {(*shape[:-2], *shape[-1:]) for shape in shapes.values()}
    if len(others) != 1 or min(map(len, shapes.values())) < 2:
        raise ValueError(
            f"the weights are {shapes}; pass matrices [..., n, k] that differ in n"
            " alone"
        )
    rows = [shape[-2] for shape in shapes.values()]
    side = _rows_of_a_scale(scaling)
    if any(n % side for n in rows[:-1]):
        raise ValueError(
            f"the weights are {shapes}, and {scaling} would lie across two of them; use"
            " vectors"
        )
    parts = list(weights.values())
    if quantize is None:
        whole = _quantized(scaling, *parts)
    else:
        whole = quantize(jnp.concatenate(parts, -2))
    made = {}
    end = 0
    for name, n in zip(weights, rows, strict=True):
        start = end
        end += n
        made[name] = _rows(whole, start, end, side)
    return made


def _rows_of_a_scale(scaling: Scaling) -> int:
    """Return the number of rows of a square that shares a scale, or 1."""
    if getattr(scaling, "tile", "vector") != "square":
        return 1
    return scaling.block if isinstance(scaling, Fp4) else getattr(scaling, "size", 1)


def store_together(
    stored: Iterable[str],
    leaves: Mapping[str, Array],
    weights: Mapping[str, Weight],
    fused: Groups,
    choose: Choose | None = None,
) -> dict[str, Stored]:
    """Store FP4 weights; those that are multiplied as one matrix have one `outer`.

    Args:
      stored: paths of the weights.
      leaves: float parameters, by path.
      weights: how each is stored, by path.
      fused, choose: as in `choose_codes`. Without `choose` the recipe's rule quantizes,
        and weights that are multiplied alone are left out.

    Raises:
      ValueError: k is odd, recipes differ, or no weight is called by any name of a
        group. A chosen operand does not fit, or FP8 products could not rely on its rule
        as the recipe does. Or `quantize_together` raises it.
    """
    made: dict[str, Stored] = {}
    for family in _families(stored, fused):
        if choose is not None or len(family) > 1:
            made |= _store_family(family, leaves, weights, choose)
    return made


def _families(weights: Iterable[str], fused: Groups) -> list[list[str]]:
    """Return the paths of weights in lists, one for each matrix that is multiplied."""
    found: dict[Hashable, list[str]] = {}
    groups = [tuple(group) for group in fused]
    met = set()
    for path in weights:
        group, family = _family_of(path, groups)
        met.add(group)
        found.setdefault(family, []).append(path)
    for group in groups:
        if group not in met:
            raise ValueError(
                f"fused has {group}, but the FP4 weights are {list(weights)[:8]}; use"
                " names of their layers"
            )
    return list(found.values())


def _family_of(
    path: str, groups: Sequence[tuple[str, ...]]
) -> tuple[tuple[str, ...], Hashable]:
    """Return the group of a weight, and a key that members of its family share.

    A weight without a group has an empty one and is its own family.
    """
    parts = path.split("/")
    for group in groups:
        for at in (1, 2):
            if at <= len(parts) and parts[-at] in group:
                # Paths of one family differ in this name alone.
                place = len(parts) - at
                return group, (group, *parts[:place], "", *parts[place + 1 :])
    return (), path


def _store_family(
    family: Sequence[str],
    leaves: Mapping[str, Array],
    weights: Mapping[str, Weight],
    choose: Choose | None,
) -> dict[str, Stored]:
    """Store weights that are multiplied as one matrix, by `choose` or by the rule."""
    first = family[0]
    scaling = weights[first].recipe.scaling
    matrices = {}
    for path in family:
        if weights[path].recipe.scaling != scaling:
            raise ValueError(
                f"{first} is stored with {scaling} and {path} otherwise; give them one"
                " recipe"
            )
        layout = weights[path].layout
        matrix = layout.matrix(leaves[path]).astype(jnp.float32)
        matrices[path] = matrix if layout.transposed else matrix.swapaxes(-1, -2)
    k = matrices[first].shape[-1]
    if k % 2:
        raise ValueError(
            f"{first} contracts k={k} values, which is odd; its codes can only be"
            " chosen by the rule"
        )

    quantize = None
    if choose is not None:
        quantize = functools.partial(_chosen, first, scaling, choose)
    stored = {}
    for path, one in quantize_together(matrices, scaling, quantize).items():
        transposed = weights[path].layout.transposed
        stored[path] = Stored(None, one) if transposed else Stored(one, None)
    return stored


def _chosen(
    path: str,
    scaling: Scaling,
    choose: Choose,
    w: Array,
) -> Operand:
    """Return the operand that a user's function chose, with its own rule.

    Products follow that rule instead of the recipe's.
    """
    made = choose(path, w)
    if _form(made.scaling) != _form(scaling):
        raise ValueError(
            f"{path} is stored with {scaling}, but its codes were chosen with"
            f" {made.scaling}; use one format"
        )
    if made.shape != w.shape:
        raise ValueError(
            f"the codes chosen for {path} are {list(made.shape)}, but it is"
            f" {list(w.shape)}"
        )
    asked = getattr(scaling, "rule", None)
    found = getattr(made.scaling, "rule", None)
    if asked == "fold_exact" != found:
        raise ValueError(
            f"{path} is stored with {scaling}, whose FP8 products are exact, but"
            f" its codes were chosen with rule={found!r}; choose them with"
            f" rule={asked!r}, as gptq(w, hessian, {scaling}) and search_scales(w,"
            f" {scaling}) do, or give the recipe rule={found!r}"
        )
    check_rule(path, made, "choose codes by the rule that the operand names")
    return made


def _form(scaling: Scaling) -> Hashable:
    """Return the format and tile of FP4 codes, or another scaling itself."""
    if isinstance(scaling, Fp4):
        return scaling.format, scaling.tile
    return scaling


def check_rule(name: str, weight: Operand, repair: str) -> None:
    """Raise a ValueError if scales break the rule "fold_exact" that an operand names.

    FP8 products rely on it. By this rule E4M3 holds the product of each scale and code
    over 2**3. No product depends on the other rules. Operands are not looked at while
    they are traced or other processes hold a part. `repair` ends the message.
    """
    if getattr(weight.scaling, "rule", None) != "fold_exact":
        return
    scale = weight.scale
    is_traced = isinstance(scale, jax.core.Tracer)
    if is_traced or not getattr(scale, "is_fully_addressable", True):
        return
    share = _HELD[np.asarray(scale).view(np.uint8)].mean()
    if share < 1:
        raise ValueError(
            f"{name} has {weight.scaling}, but only {share:.1%} of its scales are of"
            f" that rule: FP8 products would round what the others multiply; {repair}"
        )


@functools.partial(jax.jit, static_argnums=0)
def _quantized(scaling: Scaling, *weights: Array) -> Operand:
    w = jnp.concatenate(weights, axis=-2)
    if isinstance(scaling, Fp4):
        return quantize_fp4(w, scaling)

    def quantized(w: Array) -> Operand:
        return quantize_values(w, jnp.float8_e4m3fn, scaling).rows

    for _ in range(w.ndim - 2):
        quantized = jax.vmap(quantized)
    return quantized(w)


def _rows(whole: Operand, start: int, end: int, side: int) -> Operand:
    """Return rows of an operand whose scales have `side` rows."""
    scale = whole.scale
    if not isinstance(whole.scaling, Tensor):
        axis = len(whole.shape) - 2
        scale = jax.lax.slice_in_dim(scale, start // side, -(-end // side), axis=axis)
    values = whole.values[..., start:end, :]
    return dataclasses.replace(whole, values=values, scale=scale)


# Weights of a file
# --------------------------------------------------------------------------------------


def settle_families(
    weights: Mapping[str, Operand],
    schemes: Mapping[str, str],
    floats: Iterable[str],
    fused: Groups,
) -> dict[str, Operand]:
    """Return the weights of a file; zeros get a global scale that it can hold.

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
    made = dict(weights)
    empty = {name for name, weight in weights.items() if _is_zero(weight)}
    for name in sorted(empty):
        shared = np.float32(1)
        for _, other in _siblings(name, fused):
            partner = weights.get(other)
            if partner is None or other in empty or partner.outer is None:
                continue
            shared = np.float32(partner.outer)
            break
        changes: dict[str, Any] = dict(
            values=np.asarray(weights[name].values) & _SIGNS, outer=shared
        )
        made[name] = dataclasses.replace(weights[name], **changes)
    known = {**dict.fromkeys(floats, "float"), **schemes}
    outers = {
        name: float(weight.outer)
        for name, weight in made.items()
        if weight.outer is not None
    }
    for name in made:
        for group, sibling in _siblings(name, fused):
            if known.get(sibling, schemes[name]) != schemes[name]:
                raise ValueError(
                    f"{name} is stored as {schemes[name]} and {sibling} as"
                    f" {known[sibling]}, but engines multiply {list(group)} as one"
                    " matrix; store them alike, or pass fused=() for an engine that"
                    " does not"
                )
            if outers.get(sibling, outers.get(name)) != outers.get(name):
                raise ValueError(
                    f"{name} has outer={outers[name]:.9g} and {sibling}"
                    f" {outers[sibling]:.9g}, but engines multiply {list(group)} as one"
                    " matrix with one global scale; quantize them as one: name your"
                    " layers in fused= of quantize_params and choose_codes, or call"
                    " quantize_together; or pass fused=() here for an engine that does"
                    " not"
                )
    return made


def _is_zero(weight: Operand) -> bool:
    """Return whether all values of an operand with an `outer` are zero; NaN is not."""
    if weight.outer is None or not np.isfinite(weight.outer):
        return False
    return float(weight.outer) == 0 or not np.any(np.asarray(weight.values) & ~_SIGNS)


def _siblings(name: str, fused: Groups) -> Iterator[tuple[Sequence[str], str]]:
    """Yield (group, name) of the modules that engines multiply together with one.

    The module itself is among them.
    """
    parent, _, last = name.rpartition(".")
    for group in fused:
        if last not in group:
            continue
        for other in group:
            yield group, f"{parent}.{other}" if parent else other
