"""Follow one product, one layer and one converted model through the libraries, and
count the files that they cross.

A reader who wants to know what happens has to open these files, so ARCHITECTURE.md
states the counts and `tests/test_house.py` holds them. `python -m tests.walk` prints
every file with its calls.
"""

import collections
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import linen as nn

import tcfp_jax
from tcfp_jax.conversion import convert_to_tcfp
from tcfp_jax.linen import TCFPDense
from tcfp_jax.weights.quantization import quantize_weight
from tests.helpers import store_at_once, variables_of

ROOT = Path(__file__).parents[1]
LIBRARIES = tuple(str(ROOT / name) for name in ("tcfp_jax", "pallas_kernels"))


class Walk:
    """Files of the libraries that a call enters.

    Attributes:
      entered: files with at least one call.
      calls: calls into each file from another library file.
    """

    def __init__(self) -> None:
        self.calls: collections.Counter[str] = collections.Counter()
        self.entered: set[str] = set()

    def __str__(self) -> str:
        return (
            f"{len(self.entered)} files ({sum(self.calls.values())} calls across files)"
        )

    def seen(self, frame, event: str, argument: object) -> None:
        """Count one call; `sys.setprofile` calls this."""
        if event != "call":
            return
        file = frame.f_code.co_filename
        if not file.startswith(LIBRARIES) or frame.f_code.co_name == "<module>":
            return
        self.entered.add(file)
        caller = frame.f_back
        if (
            caller is not None
            and caller.f_code.co_filename != file
            and caller.f_code.co_filename.startswith(LIBRARIES)
        ):
            self.calls[file] += 1


@contextmanager
def walked() -> Iterator[Walk]:
    walk = Walk()
    sys.setprofile(walk.seen)
    try:
        yield walk
    finally:
        sys.setprofile(None)


TRACED = jax.make_user_context()


def walk_of(fn, *arguments) -> Walk:
    """Walk through a trace of the call, the second one: the first loads modules and
    tables.
    """
    jax.eval_shape(fn, *arguments)
    with TRACED(fn), walked() as walk:  # the context has traces of its own
        jax.eval_shape(fn, *arguments)
    return walk


def matmul() -> Walk:
    """A product of a stored weight, forward and backward."""
    recipe = tcfp_jax.recipe("tcfp12_fast")
    x = w = jnp.ones((32, 32))
    stored, _ = jax.jit(quantize_weight, static_argnums=1)(w, recipe)

    def loss(x, w):
        return jnp.sum(tcfp_jax.matmul(x, w, recipe=recipe, quantized=stored))

    return walk_of(jax.grad(loss, (0, 1)), x, w)


def layer() -> Walk:
    """`TCFPDense`, loss and gradient."""
    model = TCFPDense(32, recipe=tcfp_jax.recipe("tcfp12_fast"))
    x = jnp.ones((32, 32))
    params = variables_of(model, x)["params"]
    return walk_of(
        jax.value_and_grad(lambda params: jnp.sum(model.apply({"params": params}, x))),
        params,
    )


def converted() -> Walk:
    """A converted model of two layers, loss and gradient."""
    plain = nn.Sequential(
        [nn.Dense(32, use_bias=False), nn.relu, nn.Dense(32, use_bias=False)]
    )
    x = jnp.ones((32, 32))
    params = variables_of(plain, x)
    model = convert_to_tcfp(plain, "tcfp12_fast", x, include=("linear", "small"))
    return walk_of(
        jax.value_and_grad(lambda params: jnp.sum(model.apply(params, x))), params
    )


def stored_model() -> Walk:
    """`grad` of a converted model of two layers whose parameters are stored."""
    plain = nn.Sequential(
        [nn.Dense(32, use_bias=False), nn.relu, nn.Dense(32, use_bias=False)]
    )
    x = jnp.ones((32, 32))
    params = variables_of(plain, x)
    model = convert_to_tcfp(plain, "tcfp12_single", x, include=("linear", "small"))
    stored = store_at_once(params, "tcfp12_single", key=jax.random.key(0))
    return walk_of(
        tcfp_jax.grad(lambda params: jnp.sum(model.apply(params, x))), stored
    )


WALKS = {
    "a product of a stored weight": matmul,
    "`TCFPDense`": layer,
    "a converted model of two layers": converted,
    "`grad` of a stored converted model": stored_model,
}

if __name__ == "__main__":
    for name, one in WALKS.items():
        walk = one()
        print(f"{name}: {walk}")
        for file in sorted(walk.entered):
            print(f"  {walk.calls[file]:4d}  {Path(file).relative_to(ROOT)}")
