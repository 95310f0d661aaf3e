"""The benchmark of FP4 products: it checks every product, counts bits, and times
checked products.
"""

from benchmarks import fp4, records
from benchmarks.harness import benchmark
from pallas_kernels.operands import Fp4
from tests.helpers import refused, slow


@slow
def test_a_smoke_run_checks_and_times_every_product(tmp_path):
    rows = benchmark("fp4").run(["--smoke", "--out", str(tmp_path)])
    parts = ["decode"] * 4 + ["prefill"] * 4 + ["dgrad"] * 3
    assert [row.part for row in rows] == parts
    for row in rows:
        scaling = fp4.KINDS[row.kind].scaling if row.kind in fp4.KINDS else None
        # A matrix of this size notices its one float32.
        extra = 32 / (row.k * row.n) if scaling not in (None, Fp4("mxfp4")) else 0
        assert row.weight_bits == (
            16 if scaling is None else scaling.bits((row.n, row.k)) + extra
        )
        assert (row.snr_db is None) == (row.pearson is None) == (row.kind == "bf16")
        assert row.copies > 1
    assert "| decode | 2 | 64 × 32 | W4A16 mxfp4 | `xla` |" in fp4.table(
        records.read_result("fp4", tmp_path)
    )


def test_a_wrong_product_is_not_timed(monkeypatch):
    monkeypatch.setitem(fp4.LEAST_SNR_DB, "W4A16", 500.0)
    cases = (("decode", (64, 32), (2,)),)
    with refused(r"less than 500\.0 dB; nothing is timed", ArithmeticError):
        list(fp4.measure(fp4.Config(cases, cold_bytes=10_000, rounds=1, calls=2)))
