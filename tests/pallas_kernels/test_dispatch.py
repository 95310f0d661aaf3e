"""The choice of an implementation, the reasons against the others, and the record of
both.
"""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType

import tcfp_jax
from pallas_kernels import dispatch as module
from pallas_kernels import tuning
from pallas_kernels.dispatch import Implementation, dispatch, judge, recording
from pallas_kernels.hopper import plan
from pallas_kernels.matmul import api as matmul
from pallas_kernels.operands import Operand, Product, Tensor
from pallas_kernels.quantize.api import quantize
from tests.helpers import mesh_of


def multiples_of_16(options, k):
    return f"k={k} is no multiple of 16" if k % 16 else None


TABLE = (
    Implementation(
        "mosaic",
        lambda options, k: "mosaic",
        multiples_of_16,
        configure=lambda options, k: f"tile {k}",
    ),
    Implementation("xla", lambda options, k: "xla"),
)
CHOICE = (
    Implementation(
        "mosaic", lambda options, k: "mosaic", decline=lambda options, k: "slower here"
    ),
    Implementation("triton", lambda options, k: "triton"),
    Implementation("xla", lambda options, k: "xla"),
)


@pytest.fixture
def on_gpu(monkeypatch):
    """A device that runs kernels, as far as the choice between them goes."""
    monkeypatch.setattr(module, "device_kind", lambda: "NVIDIA H200")


def chosen(table, backend, k):
    return next(
        (v.backend for v in judge(table, backend, None, k) if v.reason is None), None
    )


@pytest.mark.usefixtures("on_gpu")
def test_none_takes_the_first_that_accepts():
    assert chosen(TABLE, None, 32) == "mosaic" and chosen(TABLE, None, 5) == "xla"
    assert [verdict.config for verdict in judge(TABLE, None, None, 32)] == [
        "tile 32",
        None,
    ]
    assert dispatch("op", TABLE, None, None, 5) == "xla"


def test_a_cpu_interprets_a_kernel_only_where_it_is_named():
    assert [v.reason for v in judge(TABLE, None, None, 32)] == [
        "a CPU runs a kernel only where it is named, in its interpreter if it has one",
        None,
    ]
    assert chosen(TABLE, "mosaic", 32) == "mosaic"


def test_a_named_backend_runs_or_raises():
    assert (
        chosen(TABLE, "mosaic", 32) == "mosaic" and chosen(TABLE, "mosaic", 5) is None
    )
    with pytest.raises(
        NotImplementedError,
        match="op cannot run with backend='mosaic': mosaic: k=5 is no multiple",
    ):
        dispatch("op", TABLE, "mosaic", None, 5)
    with pytest.raises(
        NotImplementedError,
        match=r"op has no 'triton' implementation \(it has 'mosaic', 'xla'\)",
    ):
        dispatch("op", TABLE, "triton", None, 32)
    with pytest.raises(ValueError, match="backend='cuda' is unknown"):
        judge(TABLE, "cuda", None, 32)


@pytest.mark.usefixtures("on_gpu")
def test_what_declines_runs_only_when_it_is_named():
    assert (
        chosen(CHOICE, None, 1) == "triton" and chosen(CHOICE, "mosaic", 1) == "mosaic"
    )
    assert [v.reason for v in judge(CHOICE, None, None, 1)] == [
        "slower here",
        None,
        "triton comes first",
    ]
    assert judge(CHOICE, "xla", None, 1)[0].reason == "backend='xla' was asked for"


@pytest.mark.usefixtures("on_gpu")
def test_the_fastest_that_can_run_is_chosen(monkeypatch):
    """A winner that rejects a call leaves it to the second, not to XLA."""
    times = {"mosaic": 1.0, "triton": 1.1, "xla": 2.0}
    entry = tuning.Entry((32,), "v", "mosaic", times, {})
    monkeypatch.setattr(tuning, "_find", lambda *_: ("NVIDIA H200", entry))
    made = functools.partial(Implementation, timed=True)
    table = (
        made("mosaic", None, multiples_of_16),
        made("triton", None, lambda options, k: "odd" if k % 2 else None),
        Implementation("xla", None, key=lambda options, k: tuning.Key("op", "v", (k,))),
    )
    assert [chosen(table, None, k) for k in (32, 8, 5)] == ["mosaic", "triton", "xla"]
    assert judge(table, None, None, 32)[1].reason.startswith("mosaic was fastest at 32")
    monkeypatch.setattr(tuning, "_find", lambda *_: ("NVIDIA H200", None))
    table = made("mosaic", None, replaces="triton"), *table[1:]
    assert [chosen(table, None, k) for k in (32, 5)] == ["xla", "mosaic"]


@pytest.mark.usefixtures("on_gpu")
def test_under_explicit_axes_the_same_runs():
    with jax.set_mesh(mesh_of(2, axis_type=AxisType.Explicit)):
        assert (
            chosen(TABLE, None, 32) == "mosaic" and chosen(CHOICE, None, 32) == "triton"
        )


def test_a_hopper_gpu_with_an_old_jax_warns_once(monkeypatch):
    """Without a warning a user would not notice that the fast kernels do not run."""
    x = Operand(jnp.ones((128, 128), jnp.float8_e4m3fn), jnp.float32(1))
    judged = lambda: judge(matmul.IMPLEMENTATIONS[Tensor], None, Product(), x, x, None)
    monkeypatch.setattr(plan, "SMALLEST_JAX", (99, 0))
    plan._warn_of_old_jax.cache_clear()
    monkeypatch.setattr(module, "device_kind", lambda: "NVIDIA A100-SXM4-80GB")
    assert "older than 0.11" in judged()[0].reason  # a warning would be an error
    monkeypatch.setattr(module, "device_kind", lambda: "NVIDIA H100 80GB HBM3")
    with pytest.warns(
        UserWarning,
        match="NVIDIA H100 80GB HBM3 runs without .* need jax 0.11 or newer",
    ) as caught:
        assert "older than 0.11" in judged()[0].reason and judged()[-1].reason is None
    assert len(caught) == 1


def test_calls_are_recorded_with_what_they_are_for():
    with recording() as calls, jax.named_scope("quantize_x"):
        quantize(jnp.ones((24, 16), jnp.bfloat16), jnp.float8_e4m3fn)
        # which cannot run it
        quantize(jnp.ones((24, 16)), jnp.float8_e4m3fn, backend="triton")
    assert [(call.step, call.op) for call in calls] == [("quantize x", "quantize")] * 2
    assert calls[0].operands == "bfloat16[24, 16]" and calls[0].chosen.backend == "xla"
    assert calls[1].chosen is None and "multiples of 16" in calls[1].verdicts[1].reason


M, K, N = 24, 32, 16


def _layers(recipe, x, ws):
    return functools.reduce(
        lambda x, w: jnp.tanh(tcfp_jax.matmul(x, w, recipe=recipe)), ws, x
    )


@pytest.mark.parametrize("name", ["bf16", "tcfp12_fast", "rowwise"])
def test_equal_layers_are_lowered_once(name):
    def lines(layers):
        ws = [jnp.ones((K, K))] * layers
        gradient = jax.jit(
            jax.grad(lambda ws: jnp.sum(_layers(name, jnp.ones((M, K)), ws)))
        )
        return len(gradient.lower(ws).as_text().splitlines())

    assert (lines(4) - lines(2)) / 2 < 20  # two calls, a tanh, and its derivative


def test_recordings_see_every_layer_and_leave_no_trace():
    x, ws = jnp.ones((M, K)), [jnp.ones((K, K))] * 3
    run = jax.jit(functools.partial(_layers, "tensorwise"))
    before = run.lower(x, ws).as_text()
    for _ in range(2):  # the second time nothing is new
        with recording() as calls:
            jax.eval_shape(run, x, ws)
        assert [call.step for call in calls] == [
            "quantize w",
            "quantize x",
            "forward",
        ] * 3
    assert run.lower(x, ws).as_text() == before


def test_what_was_measured_is_part_of_a_traced_product(monkeypatch):
    """A new table of measurements is read, though a product of these shapes was traced
    before.
    """
    x, w = jnp.ones((M, K)), jnp.ones((K, N))
    trace = lambda: jax.make_jaxpr(
        functools.partial(tcfp_jax.matmul, recipe="tensorwise")
    )(x, w)
    asked = []
    # on which everything declines, as nothing is timed
    monkeypatch.setattr(module, "device_kind", lambda: "NVIDIA L4")
    monkeypatch.setattr(
        module, "judge", lambda *a, judge=module.judge: asked.append(a[1]) or judge(*a)
    )
    tuning.load.cache_clear()
    trace()
    seen = len(asked)
    trace()
    assert 0 < seen == len(asked)
    tuning.load.cache_clear()
    trace()
    assert len(asked) == 2 * seen
    with jax.default_matmul_precision("float32"):
        trace()
    assert len(asked) == 3 * seen
