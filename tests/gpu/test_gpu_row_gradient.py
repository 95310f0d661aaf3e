"""Gradients of rows on a GPU: both backends within the bounds of float32 sums, with every config that is timed."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.row_gradient import triton
from pallas_kernels.row_gradient.api import row_gradient
from pallas_kernels.row_gradient.reference import Options
from tests.helpers import same_bits
from tests.norms import NORMS, agree, draw, expected

pytestmark = [
    pytest.mark.gpu,
    # Deprecated since jax 0.11 and still the way to 16-byte stores.
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
]


@pytest.mark.parametrize(
    "shape, dtype",
    [
        ((1024, 4096), "bfloat16"),
        ((1001, 300), "bfloat16"),
        ((1001, 300), "float32"),
        ((40009, 64), "float16"),
        ((10007, 1024), "bfloat16"),
        ((700, 3072), "float32"),
        ((300, 8192), "bfloat16"),
        ((150, 12288), "bfloat16"),
        ((16384, 128), "bfloat16"),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", NORMS)
def test_every_gradient_is_the_formula(name, shape, dtype):
    arguments = draw(name, shape, dtype)
    wanted = expected(name, *arguments)
    for backend in ("xla", "triton"):
        assert agree(jax.jit(functools.partial(row_gradient, NORMS[name][0], backend=backend))(*arguments), wanted)


@pytest.mark.parametrize("k", [1024, 4096, 8192])
def test_every_config_that_is_timed_gives_the_formula(k):
    x, vectors, dy, carried = draw("layer", (1000, k), "bfloat16")
    wanted = expected("layer", x, vectors, dy, carried)
    for config in triton.candidates(k, "bfloat16"):
        call = functools.partial(triton.row_gradient, Options(NORMS["layer"][0]), config=config)
        assert agree(jax.jit(call)(x, vectors, (dy,), carried), wanted), config


def test_what_is_carried_arrives_unchanged():
    x, vectors, dy, carried = draw("rms", (1001, 768), "bfloat16")
    call = jax.jit(functools.partial(row_gradient, NORMS["rms"][0], backend="triton"))
    dx, (dgain,) = call(x, vectors, jnp.zeros_like(dy), carried)
    assert same_bits(dx, carried) and not np.any(dgain)


def test_what_is_not_finite_stays_in_its_row():
    x, vectors, dy, carried = draw("layer", (1001, 300), "bfloat16")
    call = jax.jit(functools.partial(row_gradient, NORMS["layer"][0], backend="triton"))
    dx, (dgain, dbias) = call(x.at[700, 299].set(jnp.nan), vectors, dy, carried)
    finite = np.isfinite(np.asarray(dx, np.float32))
    assert not finite[700].any() and finite.sum() == 1000 * 300
    assert np.isnan(dgain[299]) and np.isfinite(np.asarray(dbias, np.float32)).all()


def test_the_same_bits_every_time():
    arguments = draw("layer", (4096, 4096), "bfloat16")
    call = jax.jit(functools.partial(row_gradient, NORMS["layer"][0], backend="triton"))
    assert same_bits(call(*arguments), call(*arguments))
