"""`quantize_computed`: values of a function in FP8, in both orientations."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import dispatch
from pallas_kernels.operands import Tensor
from pallas_kernels.quantize import computed
from pallas_kernels.quantize.computed import quantize_computed
from tests.helpers import parametrize, slow_except
from tests.quantizer_oracles import E5M2, LARGEST, quantized


@dataclasses.dataclass(frozen=True)
class Shares:
    """Softmax less the target, as the loss of a head computes it, times powers of
    two.
    """

    twice: bool

    def __call__(self, x, total, targets, factors, places):
        share = jnp.exp2(1.442695 * (x.astype(jnp.float32) - total))
        share -= jnp.where(targets == places, 1.0, 0.0)
        scaled = share * 2.0**13
        return (share * factors, scaled) if self.twice else (scaled,)


@slow_except("(64, 96)-one scale", "(64, 96)-rows", "(48, 40)-rows")
@parametrize("twice", [False, True], ids=["one scale", "rows"])
# 40 columns make no tiles
@parametrize("shape", [(64, 96), (48, 40)], ids=str)
def test_values_are_those_of_the_function_rounded(shape, twice):
    compute = Shares(twice)
    x = 4 * np.random.default_rng(3).standard_normal(shape)
    x = jnp.asarray(x, jnp.bfloat16).at[2, 5].set(jnp.nan)
    total = jax.nn.logsumexp(x.astype(jnp.float32), axis=1)
    targets = jnp.arange(shape[0]) % shape[1]
    rows = (total, targets, jnp.exp2((8 + targets % 6).astype(jnp.float32)))
    columns = (jnp.arange(shape[1]),)
    amax = jnp.float32(LARGEST[E5M2])
    wanted = []
    for g in compute(x, *(v[:, None] for v in rows), columns[0][None]):
        wanted.append(quantized(g, E5M2, Tensor(), amax=amax).rows.values)

    def call(x, backend):
        return quantize_computed(
            compute,
            x,
            E5M2,
            rows=rows,
            columns=columns,
            results=1 + twice,
            backend=backend,
        )

    for backend in ("xla", "triton") if shape[1] % 16 == 0 else ("xla",):
        values, turned = jax.jit(call, static_argnums=1)(x, backend)
        assert np.isnan(np.float32(values[2])).all()
        assert np.isnan(np.float32(turned[:, 2])).all()
        assert_close(values, wanted[0])
        assert_close(turned.T, wanted[-1])


def assert_close(got, wanted):
    """Equal but for neighbours, where exponentials differ in a bit."""
    got = np.float64(got)
    wanted = np.float64(wanted)
    near = np.abs(got - wanted) <= 2.0**-2 * np.abs(wanted) + 2.0**-16
    is_nan = np.isnan(wanted)
    assert (near | is_nan).all()
    assert (got == wanted)[~is_nan].mean() > 0.99


def test_no_kernel_runs_where_a_gpu_lacks_fp8(monkeypatch):
    monkeypatch.setattr(dispatch, "device_kind", lambda: "NVIDIA A100")
    monkeypatch.setattr(dispatch, "_compute_capability", lambda: 8.0)
    options = computed._Computed(Shares(False), E5M2, 1)
    arrays = (jnp.ones((64, 64)), (), ())
    triton, mosaic, xla = dispatch.judge(
        computed.IMPLEMENTATIONS, None, options, *arrays
    )
    assert "NVIDIA A100 has no instructions" in triton.reason
    assert "not a Hopper GPU" in mosaic.reason or "older than 0.11" in mosaic.reason
    assert xla.reason is None
