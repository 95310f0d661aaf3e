"""Which backend runs: what was measured decides, a named backend is shown with its reason, and nothing is computed."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import tcfp_jax
from pallas_kernels import dispatch, tuning
from pallas_kernels.matmul import mosaic

SHAPE = (8192, 4096, 16384)


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """An H200 on which the kernels were timed near one shape."""
    config = {"tile_m": 128, "tile_n": 128, "stages": 2, "cluster": 1}
    product = dict(
        shape=SHAPE, variant="dual fast bfloat16", backend="mosaic", milliseconds={"mosaic": 1.2, "xla": 1.4},
        configs={"mosaic": config},
    )  # fmt: skip
    single = dict(
        shape=SHAPE, variant="single fast bfloat16", backend="xla", milliseconds={"mosaic": 0.8, "xla": 0.7},
        configs={"mosaic": config},
    )  # fmt: skip
    path = tmp_path / "tuned.json"
    path.write_text(json.dumps({"NVIDIA H200": {"matmul": [product, single]}}))
    monkeypatch.setattr(tuning, "PATH", path)
    monkeypatch.setattr(dispatch, "device_kind", lambda: "NVIDIA H200")
    for module in (tuning, mosaic):
        monkeypatch.setattr(module, "device_kind", lambda: "NVIDIA H200")
    monkeypatch.setattr(mosaic, "SMALLEST_JAX", (0, 10))
    tuning.load.cache_clear()
    yield mosaic.Config(**config)
    tuning.load.cache_clear()


def steps(*arguments, **options):
    return {step.name: step for step in tcfp_jax.explain(*arguments, **options).steps}


def test_the_committed_measurements_can_be_read():
    tuning.load.cache_clear()
    for ops in tuning.load().values():
        for op, entries in ops.items():
            assert (Path(tuning.__file__).parent / op / "api.py").exists()
            assert all(entry.backend == min(entry.milliseconds, key=entry.milliseconds.get) for entry in entries)


def test_nothing_is_timed_on_a_cpu():
    forward = steps((128, 128), (128, 128), "tcfp12")["forward"]
    assert forward.chosen.backend == "xla"
    reasons = {verdict.backend: verdict.reason for verdict in forward.verdicts}
    assert "F16 mma.sync" in reasons["triton"]
    if jax.__version_info__[:2] >= mosaic.SMALLEST_JAX:
        assert "was not timed on cpu" in reasons["mosaic"]


def test_the_fastest_that_was_measured_runs_with_its_config(measured):
    found = steps((8, 1024, 4096), (4096, 16384), "tcfp12")
    assert found["forward"].chosen == dispatch.Verdict("mosaic", None, measured)
    assert "mosaic Config(tile_m=128" in str(found["forward"])
    assert found["wgrad"].verdicts == ()
    other = steps((4096, 8192), (8192, 32768), "tcfp12")["forward"]  # the nearest measurement is the guess
    assert other.chosen.backend == "mosaic"
    assert steps((2048, 4096), (4096, 100), "tcfp12")["forward"].chosen.backend == "xla"
    full = steps((8192, 4096), (4096, 16384), tcfp_jax.recipe("tcfp12", forward_accumulation="full"))["forward"]
    assert full.verdicts[0].reason.startswith("matmul (dual full bfloat16) was not timed on NVIDIA H200")


def test_what_lost_declines_with_the_times_and_runs_when_named(measured):
    single = steps((8192, 4096), (4096, 16384), "tensorwise")["forward"]
    assert single.chosen.backend == "xla"
    assert single.verdicts[0].reason == "xla was fastest at 8192x4096x16384 (mosaic 0.8 ms, xla 0.7 ms)"
    named = steps((8192, 4096), (4096, 16384), tcfp_jax.recipe("tensorwise", backend="mosaic"))["forward"]
    assert named.chosen.backend == "mosaic"


def test_a_named_backend_that_cannot_run_shows_why(measured):
    found = steps((100, 4096), (4096, 16384), tcfp_jax.recipe("tcfp12", backend="mosaic"))["forward"]
    assert found.chosen is None
    assert "m=100 must be a multiple of 128" in str(found)


@pytest.mark.parametrize(
    ("recipe", "names"),
    [
        ("bf16", ["forward", "dgrad", "wgrad"]),
        ("tcfp12", ["split w", "quantize x", "quantize g", "forward", "dgrad", "wgrad"]),
        ("tensorwise", ["quantize w", "quantize x", "quantize g", "forward", "dgrad", "wgrad"]),
    ],
)
def test_every_step_of_a_layer_is_there(recipe, names):
    explanation = tcfp_jax.explain((32, 16), (16, 48), recipe, dtype=jnp.float32)
    assert [step.name for step in explanation.steps] == names
    assert str(explanation).startswith(f"on {dispatch.device_kind()}\n")


def test_shapes_that_do_not_multiply():
    with pytest.raises(ValueError, match=r"x\[8, 32\] @ w\[16, 64\]"):
        tcfp_jax.explain((8, 32), (16, 64), "tcfp12")
