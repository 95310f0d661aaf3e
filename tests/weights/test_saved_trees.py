"""Trees of stored weights in files: Orbax refuses another format, and Flax's own
serializer keeps every bit.
"""

import subprocess
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from flax import serialization

import tcfp_jax
from tcfp_jax import formats, optim
from tcfp_jax.inference import quantize_params
from tests.helpers import parametrize, refused, same_bits, slow_except, store_at_once

E4M3 = tcfp_jax.recipe("tcfp12")
E5M2 = tcfp_jax.recipe("tcfp12", weight=replace(E4M3.weight, dtype="float8_e5m2"))
PARAMS = {"up": {"kernel": jnp.full((64, 64), 0.3) + jnp.arange(64) / 64}}


def fed_back(recipe=E4M3, **options):
    return jax.jit(tcfp_jax.error_feedback(recipe, **options).init)(PARAMS)


def stored(recipe=E4M3):
    return store_at_once(PARAMS, recipe, key=jax.random.key(0))


@slow_except("errors-narrow", "parameters-e4m3")
@parametrize(
    "saved, template",
    [
        (lambda: fed_back(error_dtype="float8_e5m2"), fed_back),
        (fed_back, lambda: fed_back(error_dtype="float8_e5m2")),
        (fed_back, lambda: fed_back(E5M2)),
        (lambda: fed_back(E5M2), fed_back),
        (stored, lambda: stored(E5M2)),
        (lambda: stored(E5M2), stored),
    ],
    ids=[
        "errors-narrow",
        "errors-wide",
        "copies-e4m3",
        "copies-e5m2",
        "parameters-e4m3",
        "parameters-e5m2",
    ],
)
def test_orbax_refuses_another_format(saved, template, tmp_path):
    """It would cast each array to the dtype of the template: codes to another FP8
    format, errors to another unit.
    """
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", saved())
        checkpointer.wait_until_finished()
        with refused(r"do not match|does not exist"):
            checkpointer.restore(tmp_path / "state", template())
        restored = checkpointer.restore(tmp_path / "state", saved())
    assert same_bits(restored, saved())


def test_a_state_with_other_errors_is_refused_at_the_next_update():
    tx = tcfp_jax.error_feedback(E4M3, error_dtype="float8_e5m2")
    with refused("no errors in float8_e5m2"):
        jax.eval_shape(tx.update, PARAMS, fed_back(), PARAMS)


STATES = {
    "error_feedback": (
        lambda: optax.chain(
            optax.adam(1e-3), tcfp_jax.error_feedback("tcfp12_fast")
        ).init(PARAMS)
    ),
    "store": stored,
    "adamw": lambda: optim.adamw(1e-3, key=jax.random.key(1)).init(stored()),
    "packed": lambda: quantize_params(PARAMS, "tcfp12", storage="packed"),
    "fp4": lambda: quantize_params(PARAMS, "nvfp4"),
    "format": lambda: {
        "a": formats.pack(PARAMS["up"]["kernel"], formats.nvfp4, sparsity=(4, 2))
    },
}


@slow_except("error_feedback", "store", "adamw", "fp4", "format")
@parametrize("name", STATES)
def test_flax_serializes_states_bit_for_bit(name):
    state = STATES[name]()
    again = serialization.from_bytes(
        jax.tree.map(jnp.zeros_like, state), serialization.to_bytes(state)
    )
    assert same_bits(again, state)


def test_flax_refuses_another_format():
    with refused(
        r"has \['backward', .*restore into a target with the format that was saved"
    ):
        serialization.from_bytes(stored(E5M2), serialization.to_bytes(stored()))


def test_classes_are_registered_in_any_order_of_imports():
    script = (
        "import tcfp_jax, sys, jax.numpy as jnp\nparams = tcfp_jax.store({'kernel':"
        " jnp.ones((32, 32))}, 'tcfp12_single', remainder='dropped')\nassert 'flax' not"
        " in sys.modules\nfrom flax import serialization\nimport tcfp_jax.linen\nassert"
        " serialization.from_bytes(params,"
        " serialization.to_bytes(params))['kernel'].shape == (32, 32)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
