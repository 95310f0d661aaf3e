"""Shared by the tests of formats: inputs that are hard to round, comparison by bits,
and programs quick to compile.
"""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from tcfp_jax.formats import cast, number, pack, unpack
from tests.helpers import same_bits  # noqa: F401 - both kinds of equality from here

FLOATS = [name for name in dir(ml_dtypes) if name.startswith(("float", "bfloat"))] + [
    "float16"
]
EVERY_BFLOAT16 = np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16)
MODES = ("datatype", "roundmode", "scalemode", "saturate")

# Programs as users compile them, independent of the suite's options: comparisons with
# an oracle use them.
OPTIMIZED = {
    "xla_backend_optimization_level": 3,
    "xla_llvm_disable_expensive_passes": False,
}
jitted = jax.jit(cast, static_argnames=MODES, compiler_options=OPTIMIZED)


def _quick_options():
    """Return options that compile in a third of the time, for tests that run many small
    programs once.
    """
    options = {
        "xla_backend_optimization_level": 0,
        "xla_cpu_use_fusion_emitters": False,
    }
    try:
        jax.jit(lambda x: x, compiler_options=options).lower(0.0).compile()
    except jax.errors.JaxRuntimeError:  # jax 0.12 has no other emitters
        options.pop("xla_cpu_use_fusion_emitters")
    return options


QUICK = _quick_options()
quick = jax.jit(cast, static_argnames=MODES, compiler_options=QUICK)


@functools.partial(
    jax.jit, static_argnames=(*MODES, "sparsity"), compiler_options=QUICK
)
def packed_and_cast(x, datatype, *, sparsity=None, **modes):
    """(the packed array, what unpacking it gives, the cast) of an array."""
    packed = pack(x, datatype, sparsity=sparsity, **modes)
    return packed, unpack(packed), cast(x, datatype, **modes)


def bits_of(x):
    """uint32 bits of float32, one NaN for all."""
    x = np.asarray(x, np.float32)
    return np.where(np.isnan(x), 0x7FC00000, np.ascontiguousarray(x).view(np.uint32))


def same(a, b):
    """Equal bit for bit, any NaN for any NaN."""
    return np.array_equal(bits_of(a), bits_of(b))


@functools.cache
def awkward_inputs(name):
    """Every bfloat16; every value of a number, every midpoint, and the float32
    neighbours of all of them.
    """
    line = np.array(number(name).number_line()[-(2**15) :], np.float64)
    points = np.concatenate([line, (line[1:] + line[:-1]) / 2, [number(name).midmax]])
    points = np.concatenate([points, -points])
    with np.errstate(all="ignore"):
        single = points.astype(np.float32)
        up = np.nextafter(single, np.float32(np.inf))
        down = np.nextafter(single, np.float32(-np.inf))
        return np.concatenate([EVERY_BFLOAT16.astype(np.float32), single, up, down])


def table(text):
    """The rows of a table of words: (the first word of a line, all others)."""
    return [line.split(maxsplit=1) for line in text.strip().splitlines()]


def assert_unbiased(draw, x, count=2000):
    """The mean of `draw(key)` over many keys is `x`, within five standard errors."""
    keys = jax.random.split(jax.random.key(1), count)
    samples = np.asarray(jax.jit(jax.vmap(draw))(keys), np.float64)
    error = np.abs(samples.mean(0) - np.asarray(x))
    assert np.all(error <= 5 * samples.std(0) / np.sqrt(count) + 1e-7)


def float32(x):
    """A JAX array of float32."""
    return jnp.asarray(x, jnp.float32)


def floor_log2(x):
    return np.frexp(x)[1].astype(np.int64) - 1


def mx_oracle(blocks, code, scalemode="max"):
    """Compute OCP 1.0, section 6.3, in exact integers: float32 values and results are
    integers times 2**-149.

    float64 holds x / 2**e and its rounding exactly, because x has 24 bits and a
    quotient by a power of two keeps them.
    """
    spec = number(code)
    x = blocks.astype(np.float64)
    amax = np.abs(x).max(-1, keepdims=True)
    wanted = floor_log2(np.where(amax == 0, 1, amax)) - floor_log2(np.float64(spec.max))
    shared = np.where(amax == 0, -127, wanted)
    limit = {"max": np.inf, "ceil": spec.max, "midmax": spec.midmax}[scalemode]
    shared = shared + (np.ldexp(amax, -shared) > limit)
    shared = np.clip(shared, -127, 127)
    scaled = np.ldexp(x, -shared)
    exponent = np.maximum(floor_log2(np.where(scaled == 0, 1, scaled)), spec.emin)
    exponent = np.where(scaled == 0, spec.emin, exponent)
    units = np.ldexp(scaled, spec.mbits - exponent)
    # np.round takes ties to even
    rounded = np.ldexp(np.round(units), exponent - spec.mbits)
    value = np.clip(rounded, -spec.max, spec.max)
    result = np.copysign(np.ldexp(value, shared), x)
    # nothing was lost to float32
    assert np.array_equal(result.astype(np.float32).astype(np.float64), result)
    return result.astype(np.float32)


@functools.cache
def random_blocks(count):
    """Blocks of float32 whose exponents run from -140 to 120, with zeros and blocks of
    zeros.
    """
    random = np.random.default_rng(0)
    center = random.integers(-140, 121, (count, 1))
    exponent = np.clip(center - random.geometric(0.3, (count, 32)) + 1, -149, 120)
    mantissa = 1 + random.integers(0, 2**23, (count, 32)) / 2.0**23
    is_short = random.random((count, 32)) < 0.25
    short = 1 + random.integers(0, 32, (count, 32)) / 32
    mantissa = np.where(is_short, short, mantissa)
    x = np.ldexp(mantissa, exponent) * random.choice([-1.0, 1.0], (count, 32))
    x = np.where(random.random((count, 32)) < 0.02, 0.0, x)
    x[:50] = 0
    return x.astype(np.float32)
