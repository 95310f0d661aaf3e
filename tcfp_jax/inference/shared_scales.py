"""Scales that several weights share, and the traps of a global scale that is a divisor.

Engines multiply q, k and v, or gate and up, as one matrix with one global scale. vLLM takes the largest of the scales
that a file has and multiplies every part by it, without a warning, so parts that were quantized apart come out wrong.
"""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.operands import Fp4, Operand, Scaling, Tensor
from pallas_kernels.quantize.api import quantize as quantize_values
from tcfp_jax.inference.blocks import check_rule
from tcfp_jax.weights.fp4_packing import quantize_fp4
from tcfp_jax.weights.layout import Weight
from tcfp_jax.weights.stored import Stored

# Layers that engines multiply as one matrix, by the last part of the names of their modules.
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
# A weight with larger values is suspect: this is the largest float16.
_LARGEST_WEIGHT = float(np.finfo(np.float16).max)
_LARGEST_CODE = 6.0
_SIGNS = np.uint8(0x88)  # sign bits of the two codes in a byte

# Weights of a model ---------------------------------------------------------------------------------------------------


def quantize_together(
    weights: Mapping[str, jax.Array], scaling: Scaling, quantize: Callable[[jax.Array], Operand] | None = None
) -> dict[str, Operand]:
    """Quantize weights as one matrix, so that they share the scale that a matrix has once.

    Use this for layers that an engine multiplies as one matrix.

    Args:
      weights: real floats `[..., n, k]` of any n, contracted along k.
      scaling: `Fp4(...)`, or an FP8 scaling of `pallas_kernels.operands`.
      quantize: quantizes all rows, `[..., n, k]`, instead of the scaling's own rule.

    Returns:
      Operands by the same names. NVFP4 operands have one `outer`, and FP8 operands of `Tensor()` one scale.

    Raises:
      ValueError: there are no weights, they differ in more than n, or squares would lie across two weights.

    >>> both = quantize_together({"gate": jnp.ones((2, 16)), "up": jnp.full((3, 16), 8.0)}, Fp4())
    >>> both["gate"].shape, both["up"].shape, bool(both["gate"].outer == both["up"].outer)
    ((2, 16), (3, 16), True)
    """
    shapes = {name: tuple(w.shape) for name, w in weights.items()}
    if len({(*shape[:-2], *shape[-1:]) for shape in shapes.values()}) != 1 or min(map(len, shapes.values())) < 2:
        raise ValueError(f"the weights are {shapes}; pass matrices [..., n, k] that differ in n alone")
    rows = [shape[-2] for shape in shapes.values()]
    square = getattr(scaling, "tile", "vector") == "square"
    side = (scaling.block if isinstance(scaling, Fp4) else getattr(scaling, "size", 1)) if square else 1
    if any(n % side for n in rows[:-1]):
        raise ValueError(f"the weights are {shapes}, and {scaling} would lie across two of them; use vectors")
    whole = (
        quantize(jnp.concatenate(list(weights.values()), -2)) if quantize else _quantized(scaling, *weights.values())
    )
    ends = np.cumsum(rows)
    return {name: _rows(whole, end - n, end, side) for name, n, end in zip(weights, rows, ends, strict=True)}


def families(weights: Iterable[str], fused: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return the paths of weights in lists: those that are multiplied as one matrix together, each other one alone.

    Args:
      weights: paths such as "layers/query/kernel".
      fused: groups of names of layers, or of weights, under one parent.

    Raises:
      ValueError: no weight is called by any name of a group.

    >>> families(["a/q/kernel", "a/k/kernel", "a/o/kernel", "b/q/kernel"], [("q", "k")])
    [['a/q/kernel', 'a/k/kernel'], ['a/o/kernel'], ['b/q/kernel']]
    """
    found: dict[Hashable, list[str]] = {}
    met = set()
    for path in weights:
        parts = path.split("/")
        places = [
            (group, at) for group in map(tuple, fused) for at in (1, 2) if at <= len(parts) and parts[-at] in group
        ]
        if places:
            group, at = places[0]
            met.add(group)
            # Paths of one family differ in this name alone.
            found.setdefault((group, *parts[:-at], "", *parts[len(parts) - at + 1 :]), []).append(path)
        else:
            found[path] = [path]
    if missing := [group for group in map(tuple, fused) if group not in met]:
        raise ValueError(
            f"fused has {missing[0]}, but the FP4 weights are {list(weights)[:8]}; use names of their layers"
        )
    return list(found.values())


def store_together(
    family: Sequence[str],
    leaves: Mapping[str, jax.Array],
    weights: Mapping[str, Weight],
    choose: Callable[[str, jax.Array], Operand] | None = None,
) -> dict[str, Stored]:
    """Store FP4 weights with one `outer`.

    Args:
      family: their paths.
      leaves: float parameters, by path.
      weights: recipes and layouts, by path.
      choose: takes the first path and a float32 matrix, or stack of matrices, of all rows; None is the recipe's rule.

    Raises:
      ValueError: k is odd, recipes differ, a chosen operand does not fit, or FP8 products could not rely on its rule
        as the recipe does; or `quantize_together` raises it.
    """
    first, scaling = family[0], weights[family[0]].recipe.scaling
    if other := [path for path in family if weights[path].recipe.scaling != scaling]:
        raise ValueError(f"{first} is stored with {scaling} and {other[0]} otherwise; give them one recipe")
    turned = {path: weights[path].layout.transposed for path in family}
    matrices = {path: weights[path].layout.matrix(leaves[path]).astype(jnp.float32) for path in family}
    matrices = {path: w if turned[path] else w.swapaxes(-1, -2) for path, w in matrices.items()}
    k = matrices[first].shape[-1]
    if k % 2:
        raise ValueError(f"{first} contracts k={k} values, which is odd; its codes can only be chosen by the rule")

    def chosen(w: jax.Array) -> Operand:
        assert choose is not None, "the rule quantizes otherwise"
        made = choose(first, w)
        formats = [(one.format, one.tile) if isinstance(one, Fp4) else one for one in (made.scaling, scaling)]
        if formats[0] != formats[1]:
            raise ValueError(
                f"{first} is stored with {scaling}, but its codes were chosen with {made.scaling}; use one format"
            )
        if made.shape != w.shape:
            raise ValueError(f"the codes chosen for {first} are {list(made.shape)}, but it is {list(w.shape)}")
        asked, found = (getattr(one, "rule", None) for one in (scaling, made.scaling))
        if asked == "fold_exact" != found:
            raise ValueError(
                f"{first} is stored with {scaling}, whose FP8 products are exact, but its codes were chosen with "
                f"rule={found!r}; choose them with rule={asked!r}, as gptq(w, hessian, {scaling}) and search_scales(w, "
                f"{scaling}) do, or give the recipe rule={found!r}"
            )
        check_rule(first, made, "choose codes by the rule that the operand names")
        return made  # with its own rule, which products follow instead of the recipe's

    made = quantize_together(matrices, scaling, None if choose is None else chosen)
    return {path: Stored(None, one) if turned[path] else Stored(one, None) for path, one in made.items()}


@functools.partial(jax.jit, static_argnums=0)
def _quantized(scaling: Scaling, *weights: jax.Array) -> Operand:
    """Return one operand of all rows."""
    w = jnp.concatenate(weights, axis=-2)
    if isinstance(scaling, Fp4):
        return quantize_fp4(w, scaling)
    quantized: Callable[[jax.Array], Operand] = lambda w: quantize_values(w, jnp.float8_e4m3fn, scaling).rows
    for _ in range(w.ndim - 2):
        quantized = jax.vmap(quantized)
    return quantized(w)


def _rows(whole: Operand, start: int, end: int, side: int) -> Operand:
    """Return the rows start to end of a matrix, or of a stack of them, with their scales."""
    scaling = whole.scaling
    values = whole.values[..., start:end, :]
    if isinstance(scaling, Tensor):
        return Operand(values, whole.scale, scaling=scaling)
    of_rows = whole.scaling.scale_shape(whole.shape)
    axis = len(whole.shape) - 2
    assert len(of_rows) > axis, "all but Tensor have scales of rows"
    scale = jax.lax.slice_in_dim(whole.scale, start // side, -(-end // side), axis=axis)
    return Operand(values, scale, scaling=scaling, outer=whole.outer)


# Weights of a file ----------------------------------------------------------------------------------------------------


def with_zeros(weights: Mapping[str, Operand], fused: Sequence[Sequence[str]]) -> dict[str, Operand]:
    """Return the weights of a file; a weight of zeros gets a global scale that the file can hold.

    Any scale serves zeros, and engines want one scale for all weights that they multiply as one matrix. Without other
    weights it is 1, as in `quantize_fp4` and in `generate_gparam` of the compressed-tensors package.

    Args:
      weights: by the name of the module.
      fused: groups of last parts of names.

    >>> zeros = Operand(jnp.zeros((1, 8), jnp.uint8), jnp.ones((1, 1), jnp.float8_e4m3fn), None, None, Fp4())
    >>> float(with_zeros({"a": dataclasses.replace(zeros, outer=jnp.float32(0))}, [])["a"].outer)
    1.0
    """
    empty = {name for name, weight in weights.items() if _is_zero(weight)}
    made = dict(weights)
    for name in sorted(empty):
        partners = [weights[other].outer for _, other in _siblings(name, fused) if other in weights.keys() - empty]
        shared = next((outer for outer in partners if outer is not None), 1)
        changes: dict[str, Any] = dict(values=np.asarray(weights[name].values) & _SIGNS, outer=np.float32(shared))
        made[name] = dataclasses.replace(weights[name], **changes)
    return made


def _is_zero(weight: Operand) -> bool:
    """Return whether all values of an operand with an `outer` are zero, whatever its scales are; NaN is not."""
    if weight.outer is None or not np.isfinite(weight.outer):
        return False
    return float(weight.outer) == 0 or not np.any(np.asarray(weight.values) & ~_SIGNS)


def _siblings(name: str, fused: Sequence[Sequence[str]]) -> Iterator[tuple[Sequence[str], str]]:
    """Yield (group, name of a member) of the modules that engines multiply as one matrix, `name` among them."""
    parent, _, last = name.rpartition(".")
    for group in fused:
        if last in group:
            yield from ((group, f"{parent}.{other}" if parent else other) for other in group)


def divisor_of(name: str, outer: np.float32) -> np.float32:
    """Return the global scale of a file, 1 / outer, whose reciprocal is `outer` again if any float32's is.

    Raises:
      ValueError: `outer` or its reciprocal is not a positive finite float32.

    >>> divisor_of("w", np.float32(0.25))
    np.float32(4.0)
    """
    one = np.float32(1)
    with np.errstate(divide="ignore", over="ignore"):
        near = one / np.float32(outer)
    if not (np.isfinite(near) and np.isfinite(outer) and near > 0):
        raise ValueError(
            f"{name} has outer={outer} and needs the global scale {near} in a file, but both must be positive and "
            "finite; quantize finite weights whose largest is above 1e-30"
        )
    # If its reciprocal differs from `outer`, so do its neighbours' reciprocals: checked for all numbers of a binade.
    return near


def check_global_scales(largest: Mapping[str, tuple[float, float]], repair: str) -> None:
    """Raise if most NVFP4 weights have a global scale that looks inverted.

    A file holds 1 / outer, and value = code * scale / global. A quantizer that fills the range of E4M3 has a largest
    block scale s near 448 and a global scale of 6 * 448 / max |w|, so a reader of the inverse finds values up to
    7.2e6 / max |w|. A weight is suspect if `6 * s * outer` exceeds the largest float16, 65504, and a file is inverted
    if more than half of the weights whose global scale is not 1 are suspect. That never holds if half of the weights
    fit float16, and always if the largest values of most weights are below 110 (below 36 for "four_over_six" and
    "fold_exact", which have s from 256 on and a global scale of 6 * 256 / max |w|).

    Args:
      largest: by name (largest block scale, `outer` as the file gives it).
      repair: advice for the message.

    Raises:
      ValueError: most weights are suspect.

    >>> check_global_scales({"w": (448.0, 1e-4)}, "")
    """
    judged = {name: (s, outer) for name, (s, outer) in largest.items() if outer != 1 and s > 0}
    suspect = {name: pair for name, pair in judged.items() if _LARGEST_CODE * pair[0] * pair[1] > _LARGEST_WEIGHT}
    if 2 * len(suspect) <= len(judged):
        return
    name, (scale, outer) = next(iter(suspect.items()))
    raise ValueError(
        f"{name} has block scales up to {scale:g} and the global scale {1 / outer:.6g}, so that its largest value is "
        f"6 * {scale:g} / {1 / outer:.6g} = {_LARGEST_CODE * scale * outer:.3g}, beyond {_LARGEST_WEIGHT:g}; with the "
        f"inverse it is {_LARGEST_CODE * scale / outer:.3g} ({len(suspect)} of {len(judged)} weights are like this): "
        f"the global scale is inverted, a multiplier instead of a divisor; {repair}"
    )


def check_fused(
    schemes: Mapping[str, str], shared: Mapping[str, float], floats: Iterable[str], fused: Sequence[Sequence[str]]
) -> None:
    """Raise if layers that engines multiply as one matrix are stored differently or have several global scales.

    Args:
      schemes: descriptions of how each quantized module is stored, by the name of the module.
      shared: `outer` by name, if a module has one.
      floats: names of modules that stay float.
      fused: groups of last parts of names.

    Raises:
      ValueError: two members of a group are stored differently, or have two values of `outer`.

    >>> check_fused({"a.q_proj": "nvfp4", "a.k_proj": "nvfp4"}, {"a.q_proj": 0.5, "a.k_proj": 0.5}, [], FUSED)
    """
    known = {**dict.fromkeys(floats, "float"), **schemes}
    for name in schemes:
        for group, sibling in _siblings(name, fused):
            if known.get(sibling, schemes[name]) != schemes[name]:
                raise ValueError(
                    f"{name} is stored as {schemes[name]} and {sibling} as {known[sibling]}, but engines multiply "
                    f"{list(group)} as one matrix; store them alike, or pass fused=() for an engine that does not"
                )
            if shared.get(sibling, shared.get(name)) != shared.get(name):
                raise ValueError(
                    f"{name} has outer={shared[name]:.9g} and {sibling} {shared[sibling]:.9g}, but engines "
                    f"multiply {list(group)} as one matrix with one global scale; quantize them as one: name your "
                    "layers in fused= of quantize_params and choose_codes, or call quantize_together; or pass "
                    "fused=() here for an engine that does not"
                )
