"""`explain` records the step that runs: measured times decide, and a named backend is
shown with its reason.
"""

import dataclasses
import json

import jax.numpy as jnp
import optax
import pytest

import tcfp_jax
from pallas_kernels import dispatch, tuning
from pallas_kernels.hopper import plan
from pallas_kernels.matmul import reference

SHAPE = (8192, 4096, 16384)


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """An H200 on which the kernels were timed near one shape."""
    config = {"tile_m": 128, "tile_n": 128, "stages": 2, "cluster": 1}
    entries = [
        dict(
            shape=SHAPE,
            variant=variant,
            backend=min(times, key=times.get),
            milliseconds=times,
            configs={"mosaic": config},
        )
        for variant, times in (
            ("dual fast bfloat16", {"mosaic": 1.2, "xla": 1.4}),
            ("single fast bfloat16", {"mosaic": 0.8, "xla": 0.7}),
        )
    ]
    path = tmp_path / "tuned.json"
    path.write_text(json.dumps({"NVIDIA H200": {"matmul": entries}}))
    monkeypatch.setattr(tuning, "PATH", path)
    monkeypatch.setattr(dispatch, "device_kind", lambda: "NVIDIA H200")
    monkeypatch.setattr(plan, "SMALLEST_JAX", (0, 10))
    # Kernels for a device that is not there are chosen, and the reference is traced in
    # their place.
    monkeypatch.setattr(dispatch, "_jitted", lambda run: reference.matmul)
    tuning.load.cache_clear()
    yield plan.Config(**config)
    tuning.load.cache_clear()


def calls(*arguments, **options):
    return {call.step: call for call in tcfp_jax.explain(*arguments, **options).steps}


def test_the_committed_measurements_can_be_read():
    tuning.load.cache_clear()
    for ops in tuning.load().values():
        for entries in ops.values():
            assert all(
                entry.backend == min(entry.milliseconds, key=entry.milliseconds.get)
                for entry in entries
            )


def test_a_cpu_runs_no_kernel_that_is_not_named():
    forward = calls((128, 128), (128, 128), "tcfp12")["forward"]
    assert forward.chosen.backend == "xla"
    reasons = {verdict.backend: verdict.reason for verdict in forward.verdicts}
    interpreted = (
        "a CPU runs a kernel only where it is named, in its interpreter if it has one"
    )
    assert reasons == {"mosaic": interpreted, "triton": interpreted, "xla": None}


def test_the_fastest_that_was_measured_runs_with_its_config(measured):
    explanation = tcfp_jax.explain((8, 1024, 4096), (4096, 16384), "tcfp12")
    found = {call.step: call for call in explanation.steps}
    assert found["forward"].chosen == dispatch.Verdict("mosaic", None, measured)
    assert "mosaic Config(tile_m=128" in str(explanation)
    assert found["wgrad"].verdicts == ()
    # the nearest measurement is the guess
    other = calls((4096, 8192), (8192, 32768), "tcfp12")["forward"]
    assert other.chosen.backend == "mosaic"
    assert calls((2048, 4096), (4096, 100), "tcfp12")["forward"].chosen.backend == "xla"
    full = calls(
        (8192, 4096), (4096, 16384), tcfp_jax.recipe("tcfp12", forward="full")
    )["forward"]
    assert full.verdicts[0].reason.startswith(
        "matmul (dual full bfloat16) was not timed on NVIDIA H200"
    )


def test_a_chip_like_one_that_was_timed_has_its_times_and_says_so(
    measured, monkeypatch
):
    monkeypatch.setattr(dispatch, "device_kind", lambda: "NVIDIA H100 80GB HBM3")
    assert tuning.timed_device("NVIDIA H100 80GB HBM3") == "NVIDIA H200"
    forward = calls((8192, 4096), (4096, 16384), "tcfp12")["forward"]
    assert forward.chosen == dispatch.Verdict("mosaic", None, measured)
    single = calls((8192, 4096), (4096, 16384), "tensorwise")["forward"]
    assert single.verdicts[0].reason.startswith(
        "xla was fastest at 8192x4096x16384 on NVIDIA H200 (mosaic"
    )
    assert tuning.timed_device("NVIDIA H20") == "NVIDIA H20"
    # Its own times of a variant count as soon as there is one, and estimates are of one
    # device.
    content = json.loads(tuning.PATH.read_text())
    entry = next(
        e
        for e in content["NVIDIA H200"]["matmul"]
        if e["variant"] == "single fast bfloat16"
    )
    own = entry | {
        "backend": "mosaic",
        "milliseconds": {"xla": 0.9, "mosaic": 0.8},
        "configs": {},
    }
    tuning.PATH.write_text(
        json.dumps({**content, "NVIDIA H100 80GB HBM3": {"matmul": [own]}})
    )
    tuning.load.cache_clear()
    single = calls((8192, 4096), (4096, 16384), "tensorwise")["forward"]
    assert single.chosen.backend == "mosaic"
    forward = calls((8192, 4096), (4096, 16384), "tcfp12")["forward"]
    assert forward.chosen == dispatch.Verdict("mosaic", None, measured)
    assert tuning.timed_device("NVIDIA H100 80GB HBM3") == "NVIDIA H200"


def test_what_lost_declines_with_the_times_and_runs_when_named(measured):
    single = calls((8192, 4096), (4096, 16384), "tensorwise")["forward"]
    assert single.chosen.backend == "xla"
    assert (
        single.verdicts[0].reason
        == "xla was fastest at 8192x4096x16384 (mosaic 0.8 ms, xla 0.7 ms)"
    )
    named = calls(
        (8192, 4096), (4096, 16384), tcfp_jax.recipe("tensorwise", backend="mosaic")
    )["forward"]
    assert named.chosen.backend == "mosaic"


def test_a_named_backend_that_cannot_run_shows_why(measured):
    explanation = tcfp_jax.explain(
        (100, 4096), (4096, 16384), tcfp_jax.recipe("tcfp12", backend="mosaic")
    )
    assert (
        next(call for call in explanation.steps if call.step == "forward").chosen
        is None
    )
    assert "m=100 must be a multiple of 128" in str(explanation)


X_STEPS = ["quantize x", "forward", "quantize g", "dgrad", "wgrad"]


@pytest.mark.parametrize(
    ("recipe", "names"),
    [
        ("bf16", ["forward", "dgrad", "wgrad"]),
        ("tcfp12", [*X_STEPS, "quantize w"]),
        ("tensorwise", [*X_STEPS, "quantize w"]),
        (
            "rowwise",
            [
                "quantize x",
                *["forward"] * 2,
                "quantize g",
                *["dgrad"] * 2,
                *["wgrad"] * 2,
                "quantize w",
            ],
        ),
        ("tcfp12_blockwise", [*X_STEPS, "quantize w"]),
    ],
)
def test_every_step_of_a_layer_is_there(recipe, names):
    explanation = tcfp_jax.explain((32, 16), (16, 48), recipe, dtype=jnp.float32)
    assert [call.step for call in explanation.steps] == names
    assert str(explanation).startswith(f"on {dispatch.device_kind()}\n")


@pytest.mark.parametrize("error_dtype", ["float32", "bfloat16"])
def test_the_optimizers_choices_are_part_of_the_step(error_dtype, monkeypatch):
    tx = optax.chain(
        optax.sgd(1e-3), tcfp_jax.error_feedback("tcfp12", error_dtype=error_dtype)
    )
    found = calls((32, 64), (64, 32), "tcfp12", optimizer=tx)["quantize w"]
    assert found.operands == f"float32[64, 32] x {error_dtype}[64, 32]"
    # a device without times
    monkeypatch.setattr(dispatch, "device_kind", lambda: "NVIDIA L4")
    found = calls(
        (32, 64), (64, 32), tcfp_jax.recipe("tcfp12", backend="xla"), optimizer=tx
    )["quantize w"]
    assert (
        f"error {error_dtype}) was not timed"
        in {v.backend: v.reason for v in found.verdicts}["triton"]
    )
    fresh = tcfp_jax.explain((32, 64), (64, 32), "tcfp12", optimizer=optax.sgd(0.1))
    assert fresh.steps[0].step == "quantize w"  # in the forward pass, without an error


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        (
            "nvfp4_training",
            "emulated    operands are NVFP4 values, which BF16 holds exactly",
        ),
        (
            tcfp_jax.recipe("nvfp4_training", forward_operands="bf16"),
            "operands of dgrad and wgrad are NVFP4",
        ),
    ],
)
def test_fp4_training_says_what_it_emulates(recipe, words):
    explanation = tcfp_jax.explain((32, 16), (16, 48), recipe)
    assert words in str(explanation) and "no FP4 tensor core runs" in str(explanation)
    calls = [call for call in explanation.steps if call.op != "quantize_values"]
    assert [call.step for call in calls] == ["forward", "dgrad", "wgrad"] and len(
        explanation.steps
    ) > len(calls)
    assert all(call.operands.startswith("bfloat16") for call in calls)
    assert "emulated" not in str(tcfp_jax.explain((32, 16), (16, 48), "nvfp4"))


def test_nothing_is_said_of_the_speed_of_fp4_training():
    """Its quantizers are not among the operations that are timed, so that the products'
    times are not the layer's.
    """
    found = tcfp_jax.explain((32, 16), (16, 48), "nvfp4_training")
    timed = dataclasses.replace(
        found,
        bf16=found.steps,
        **dict.fromkeys(("times", "bf16_times"), (1.0,) * len(found.steps)),
    )
    assert (
        timed.speed_over_bf16 is None
        and "in all      the quantizers of FP4 training were not timed" in str(timed)
    )
    assert dataclasses.replace(timed, emulated="").speed_over_bf16 == 1


def test_what_a_cpu_says_of_the_fp4_kernel_is_true():
    """Its codes are decoded in PTX, which no interpreter runs: named, it rejects."""
    forward = calls((128, 256), (256, 64), "nvfp4")["forward"]
    assert (
        forward.verdicts[0].reason
        == "a CPU runs a kernel only where it is named, in its interpreter if it"
        " has one"
    )
    named = calls((128, 256), (256, 64), tcfp_jax.recipe("nvfp4", backend="mosaic"))[
        "forward"
    ]
    assert named.chosen is None and any(
        word in named.verdicts[0].reason for word in ("PTX", "older than 0.11")
    )


def test_a_timed_device_that_this_machine_lacks():
    shapes = ((8192, 4096), (4096, 16384))
    found = tcfp_jax.explain(*shapes, "tensorwise", device="NVIDIA H200")
    assert found.device == found.timed_on == "NVIDIA H200"
    assert found.speed_over_bf16 > 1
    assert {call.step: call for call in found.steps}["quantize g"].chosen
    assert tcfp_jax.explain(*shapes, "tensorwise").device == dispatch.device_kind()


MISTAKES = [
    (((8, 32), (16, 64), "tcfp12"), {}, r"x\[8, 32\] @ w\[16, 64\]"),
    (((8, 32), 64, "tcfp12"), {}, "must be shapes"),
    (
        ((8, 32), (32, 64), "tcfp12"),
        {"device": "NVIDIA L4"},
        r"device='NVIDIA L4' was not timed; use one of .*'NVIDIA H200'",
    ),
]


@pytest.mark.parametrize(("arguments", "options", "message"), MISTAKES, ids=str)
def test_mistakes(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        tcfp_jax.explain(*arguments, **options)
