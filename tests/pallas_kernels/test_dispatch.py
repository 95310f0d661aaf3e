"""The choice of an implementation, the reasons against others, and their record."""

from functools import partial

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
from pallas_kernels.operands import MatmulOptions, Operand, Tensor
from pallas_kernels.quantize.api import quantize
from tests.helpers import mesh_of, parametrize, refused


def multiples_of_16(options, k):
    return f"k={k} is no multiple of 16" if k % 16 else None


def made(backend, *rest, **more):
    """An implementation whose result is its name."""
    return Implementation(backend, lambda options, k: backend, *rest, **more)


TABLE = (
    made("mosaic", multiples_of_16, configure=lambda options, k: f"tile {k}"),
    made("xla"),
)
CHOICE = (
    made("mosaic", decline=lambda options, k: "slower here"),
    made("triton"),
    made("xla"),
)


@pytest.fixture
def on_gpu(monkeypatch):
    """A device that runs kernels, as far as the choice between them goes."""
    monkeypatch.setattr(module, "device_kind", lambda: "NVIDIA H200")


def chosen(table, backend, k):
    for verdict in judge(table, backend, None, k):
        if verdict.reason is None:
            return verdict.backend
    return None


def reasons(table, backend=None, k=32):
    return [verdict.reason for verdict in judge(table, backend, None, k)]


@pytest.mark.usefixtures("on_gpu")
def test_none_takes_the_first_that_accepts():
    assert chosen(TABLE, None, 32) == "mosaic"
    assert chosen(TABLE, None, 5) == "xla"
    first, second = judge(TABLE, None, None, 32)
    assert first.config == "tile 32"
    assert second.config is None
    assert dispatch("op", TABLE, None, None, 5) == "xla"


def test_a_cpu_interprets_a_kernel_only_where_it_is_named():
    named = (
        "a CPU runs a kernel only where it is named, in its interpreter if it has one"
    )
    assert reasons(TABLE) == [named, None]
    assert chosen(TABLE, "mosaic", 32) == "mosaic"


REFUSED = [
    (
        "mosaic",
        NotImplementedError,
        "op cannot run with backend='mosaic': mosaic: k=5 is no multiple",
    ),
    (
        "triton",
        NotImplementedError,
        r"op has no 'triton' implementation \(it has 'mosaic', 'xla'\)",
    ),
    ("cuda", ValueError, "backend='cuda' is unknown"),
]


@parametrize("backend, error, message", REFUSED)
def test_a_named_backend_runs_or_raises(backend, error, message):
    assert chosen(TABLE, "mosaic", 32) == "mosaic"
    with refused(message, error):
        dispatch("op", TABLE, backend, None, 5)


@pytest.mark.usefixtures("on_gpu")
def test_an_implementation_that_declines_runs_if_it_is_named():
    assert chosen(CHOICE, None, 1) == "triton"
    assert chosen(CHOICE, "mosaic", 1) == "mosaic"
    assert reasons(CHOICE) == ["slower here", None, "triton comes first"]
    assert reasons(CHOICE, "xla")[0] == "backend='xla' was asked for"


@pytest.mark.usefixtures("on_gpu")
def test_the_fastest_that_can_run_is_chosen(monkeypatch):
    """A winner that rejects a call leaves it to the second, not to XLA."""
    times = {"mosaic": 1.0, "triton": 1.1, "xla": 2.0}
    entry = tuning.Entry((32,), "v", "mosaic", times, {})
    monkeypatch.setattr(tuning, "_find", lambda *_: ("NVIDIA H200", entry))
    table = (
        made("mosaic", multiples_of_16, timed=True),
        made("triton", lambda options, k: "odd" if k % 2 else None, timed=True),
        made("xla", key=lambda options, k: tuning.Key("op", "v", (k,))),
    )
    assert [chosen(table, None, k) for k in (32, 8, 5)] == ["mosaic", "triton", "xla"]
    assert reasons(table)[1].startswith("mosaic was fastest at 32")
    monkeypatch.setattr(tuning, "_find", lambda *_: ("NVIDIA H200", None))
    table = made("mosaic", timed=True, replaces="triton"), *table[1:]
    assert [chosen(table, None, k) for k in (32, 5)] == ["xla", "mosaic"]


@pytest.mark.usefixtures("on_gpu")
def test_under_explicit_axes_the_same_runs():
    with jax.set_mesh(mesh_of(2, axis_type=AxisType.Explicit)):
        assert chosen(TABLE, None, 32) == "mosaic"
        assert chosen(CHOICE, None, 32) == "triton"


def test_a_hopper_gpu_with_an_old_jax_warns_once(monkeypatch):
    """Without a warning a user would not notice that the fast kernels do not run."""
    x = Operand(jnp.ones((128, 128), jnp.float8_e4m3fn), jnp.float32(1))

    def judged():
        table = matmul.IMPLEMENTATIONS[Tensor]
        return [v.reason for v in judge(table, None, MatmulOptions(), x, x, None)]

    monkeypatch.setattr(plan, "SMALLEST_JAX", (99, 0))
    plan._warn_of_old_jax.cache_clear()
    monkeypatch.setattr(module, "device_kind", lambda: "NVIDIA A100-SXM4-80GB")
    assert "older than 0.11" in judged()[0]  # a warning would be an error
    monkeypatch.setattr(module, "device_kind", lambda: "NVIDIA H100 80GB HBM3")
    message = "NVIDIA H100 80GB HBM3 runs without .* need jax 0.11 or newer"
    with pytest.warns(UserWarning, match=message) as caught:
        reasons = judged() + judged()
    assert "older than 0.11" in reasons[0]
    assert reasons[-1] is None
    assert len(caught) == 1


def test_calls_are_recorded_with_their_purpose():
    with recording() as calls, jax.named_scope("quantize_x"):
        quantize(jnp.ones((24, 16), jnp.bfloat16), jnp.float8_e4m3fn)
        # which cannot run it
        quantize(jnp.ones((24, 16)), jnp.float8_e4m3fn, backend="triton")
    by_xla, rejected = calls
    assert (by_xla.step, by_xla.op) == ("quantize x", "quantize")
    assert (rejected.step, rejected.op) == ("quantize x", "quantize")
    assert by_xla.operands == "bfloat16[24, 16]"
    assert by_xla.chosen.backend == "xla"
    assert rejected.chosen is None
    assert "multiples of 16" in rejected.verdicts[1].reason


M, K, N = 24, 32, 16


def _layers(recipe, x, ws):
    for w in ws:
        x = jnp.tanh(tcfp_jax.matmul(x, w, recipe=recipe))
    return x


@parametrize("name", ["bf16", "tcfp12_fast", "rowwise"])
def test_equal_layers_are_lowered_once(name):
    def loss(ws):
        return jnp.sum(_layers(name, jnp.ones((M, K)), ws))

    def lines(layers):
        ws = [jnp.ones((K, K))] * layers
        return len(jax.jit(jax.grad(loss)).lower(ws).as_text().splitlines())

    assert (lines(4) - lines(2)) / 2 < 20  # two calls, a tanh, and its derivative


def test_recordings_see_every_layer_and_leave_no_trace():
    x = jnp.ones((M, K))
    ws = [jnp.ones((K, K))] * 3
    steps = ["quantize w", "quantize x", "forward"] * 3
    run = jax.jit(partial(_layers, "tensorwise"))
    before = run.lower(x, ws).as_text()
    for _ in range(2):  # the second time nothing is new
        with recording() as calls:
            jax.eval_shape(run, x, ws)
        assert [call.step for call in calls] == steps
    assert run.lower(x, ws).as_text() == before


def test_measurements_are_part_of_a_traced_product(monkeypatch):
    """A new table is read, though a product of these shapes was traced before."""
    asked = []

    def asking(*arguments):
        asked.append(arguments)
        return judge(*arguments)

    def trace():
        run = partial(tcfp_jax.matmul, recipe="tensorwise")
        jax.make_jaxpr(run)(jnp.ones((M, K)), jnp.ones((K, N)))

    # on which everything declines, as nothing is timed
    monkeypatch.setattr(module, "device_kind", lambda: "NVIDIA L4")
    monkeypatch.setattr(module, "judge", asking)
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
