"""Frozen weights with merged adapters: the adapters' change survives quantization."""

from functools import partial

import jax.numpy as jnp
import numpy as np

import tcfp_jax
from pallas_kernels.operands import Fp4, Operand, Row
from pallas_kernels.quantize.api import quantize
from tcfp_jax.inference.merging import keep_changes, to_bfloat16
from tcfp_jax.inference.shared_scales import quantize_together
from tcfp_jax.weights.fp4_packing import quantize_fp4
from tests.helpers import drawn, parametrize
from tests.optim.zoo import KEY, RECIPE

SHAPE = (384, 512)
FP8 = partial(quantize_together, scaling=Row())
NVFP4 = partial(quantize_together, scaling=Fp4("nvfp4"))
FORMS = {"bf16": to_bfloat16, "fp8": FP8, "nvfp4": NVFP4}


def values(one):
    return one.dequantize() if isinstance(one, Operand) else one


def frozen(form, seed):
    w = drawn(*SHAPE, seed=seed)
    if form == "nvfp4":
        return quantize_fp4(w).dequantize()
    return quantize(w, jnp.float8_e4m3fn).rows.dequantize()


def part(w, size, seed):
    """The change by an adapter of rank 4 and of a size relative to the weight."""
    change = drawn(SHAPE[0], 4, seed=seed) @ drawn(4, SHAPE[1], seed=seed + 1)
    return change * (size * jnp.linalg.norm(w) / jnp.linalg.norm(change))


def share(after, before, change):
    kept = np.float64(values(after)) - np.float64(values(before))
    return np.vdot(kept, change) / np.vdot(change, change)


@parametrize(
    "of, form, size, nearest",
    [
        ("nvfp4", "nvfp4", 1e-3, 0.05),
        ("nvfp4", "nvfp4", 0.014, 0.1),
        ("nvfp4", "nvfp4", 0.1, 0.9),
        ("tensorwise", "fp8", 1e-3, 0.3),
        ("tensorwise", "fp8", 0.014, 0.7),
        ("tensorwise", "bf16", 5e-4, 0.7),
        ("tensorwise", "nvfp4", 0.014, None),
        ("nvfp4", "fp8", 0.014, None),
    ],
)
def test_the_change_by_adapters_survives_an_export(of, form, size, nearest):
    """`nearest` is above the share that rounding to nearest keeps."""
    before = {"gate": frozen(of, 0), "up": frozen(of, 1)}
    changes = {
        "gate": part(before["gate"], size, 2),
        "up": part(before["up"], size / 2, 6),
    }
    merged = {name: w + changes[name] for name, w in before.items()}
    plain = FORMS[form](before)
    made = keep_changes(FORMS[form], merged, changes)
    # Rounding to other scales than those of the frozen weight is noise of its own
    slack = 0.1 if "nvfp4" in (of, form) else 0.02
    for name, change in changes.items():
        assert abs(share(made[name], plain[name], change) - 1) < slack, name
    if form == "nvfp4":
        assert made["gate"].outer == made["up"].outer
    lost = np.linalg.norm(values(made["gate"]) - merged["gate"])
    rounded = FORMS[form](merged)["gate"]
    if nearest is not None:
        assert share(rounded, plain["gate"], changes["gate"]) < nearest
    most = {"bf16": 0.01, "fp8": 0.04, "nvfp4": 0.13}
    assert lost < most[form] * np.linalg.norm(merged["gate"])


@parametrize("form", ["fp8", "nvfp4"])
@parametrize("size", [0.014, 0.05])
def test_training_of_stored_weights_survives_an_export(form, size):
    """They lie between the numbers of the grid, so rounding to nearest keeps it."""
    w = drawn(*SHAPE)
    change = part(w, size, 1)
    before, after = (
        tcfp_jax.dequantize(tcfp_jax.store({"kernel": one}, RECIPE, key=KEY))
        for one in (w, w + change)
    )
    exported = [FORMS[form](one)["kernel"] for one in (before, after)]
    assert 0.9 < share(exported[1], exported[0], change) < 1.1


def test_a_change_of_zeros_is_not_stretched():
    w = {"w": frozen("nvfp4", 0)}
    zeros = {"w": jnp.zeros(SHAPE)}
    made = keep_changes(NVFP4, w, zeros)["w"]
    assert np.array_equal(values(made), values(NVFP4(w)["w"]))
