"""The benchmark of FP4 products: it checks every product, counts bits, and times what it checked."""

import functools

import jax
import ml_dtypes
import numpy as np
import pytest

from benchmarks import common, fp4, fp4_sizes
from pallas_kernels.operands import Fp4


@pytest.mark.slow
def test_a_smoke_run_checks_and_times_every_product(tmp_path):
    rows = common.main(fp4.NAME, ["--smoke", "--out", str(tmp_path)])
    assert [row.part for row in rows] == ["decode"] * 3 + ["prefill"] * 3 + ["dgrad"] * 2
    for row in rows:
        scaling = fp4.KINDS[row.kind].scaling if row.kind in fp4.KINDS else None
        # A matrix of this size notices its one float32.
        extra = 32 / (row.k * row.n) if scaling == Fp4() else 0
        assert row.weight_bits == (16 if scaling is None else scaling.bits((row.n, row.k)) + extra)
        assert (row.snr_db is None) == (row.kind == fp4.BASELINE) and row.copies > 1
    assert "| decode | 2 | 64 × 32 | W4A16 mxfp4 | `xla` |" in fp4.table(common.read_result(fp4.NAME, tmp_path))


def test_a_wrong_product_is_not_timed(monkeypatch):
    monkeypatch.setitem(fp4.LEAST_SNR_DB, "W4A16", 500.0)
    cases = (("decode", (64, 32), (2,)),)
    with pytest.raises(ArithmeticError, match=r"less than 500\.0 dB; nothing is timed"):
        list(fp4.measure(fp4.Config(cases, cold_bytes=10_000, rounds=1, calls=2)))


@pytest.mark.parametrize(
    ("m", "k", "n", "abreast", "by_block"),
    [(1, 8192, 28672, True, True), (16, 8192, 28672, True, False), (64, 8192, 28672, False, False),
     (1, 8192, 8192, False, True), (16, 28672, 8192, False, False)],
)  # fmt: skip
def test_ways_are_those_that_the_kernel_takes(m, k, n, abreast, by_block):
    found = fp4_sizes.ways(m, k, n)
    plain = [fp4_sizes.BEFORE, *[fp4_sizes.BY_BLOCKS] * by_block]
    assert list(found) == plain + [f"{name}, 2 abreast" for name in plain if abreast]
    assert all(config.abreast == 1 + name.endswith("2 abreast") for name, config in found.items())
    assert fp4_sizes.chosen(m, k, n) in found.values()


def test_ways_that_differ_are_not_timed():
    found = fp4_sizes.ways(1, 8192, 28672)
    x = np.random.default_rng(0).standard_normal((1, 64)).astype(ml_dtypes.bfloat16)
    near, far = (np.asarray(x * (1 + error)).astype(x.dtype) for error in (2.0**-8, 0.1))
    check = functools.partial(fp4_sizes._check, (1, 8192, 28672), found)
    check({name: near if name.endswith("abreast") else x for name in found})
    with pytest.raises(ArithmeticError, match="results of 'every block' are not those of 'a kernel before'"):
        check({name: near if name == fp4_sizes.BY_BLOCKS else x for name in found})
    with pytest.raises(ArithmeticError, match=r"'a kernel before, 2 abreast' is 20\.0 dB from 'a kernel before'"):
        check({name: far if name.endswith("abreast") else x for name in found})


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there it runs")
def test_sizes_are_not_timed_without_the_kernel():
    with pytest.raises(ValueError, match="run it on one"):
        list(fp4_sizes.measure(fp4_sizes.Config(())))
