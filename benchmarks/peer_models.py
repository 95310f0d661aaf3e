"""The same model with the FP8 of other libraries: blocks of a Llama, and an MLP.

* Flax: `Fp8DirectDotGeneralOp`, with delayed scales.
* Google's qwix, with a fresh scale for each tensor at every use.
* NVIDIA's Transformer Engine, with a fresh scale for each tensor or with delayed ones,
  and its own norms and activations (`benchmarks.transformer_engine`).

All quantize their weights within the call. A call also returns the next scales of
libraries that delay them.
"""

import contextlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen import fp8_ops
from jax import Array

from benchmarks import timing, transformer_engine
from benchmarks.products import GemmShape
from benchmarks.train_step import Candidate
from models.nets.llama import Block
from models.nets.positions import rotations
from models.nets.shapes import LlamaConfig

FLAX = "flax Fp8DirectDotGeneralOp"
QWIX = "qwix"
PEERS = (FLAX, QWIX, *transformer_engine.RECIPES)
# key -> (parameters, input, gradient of the output)
Draw = Callable[[Array], tuple[Any, Array, Array]]


def is_installed(name: str) -> bool:
    """Return whether a candidate can run here; print the reason if not."""
    reason = None
    if name == QWIX and importlib.util.find_spec(QWIX) is None:
        reason = "qwix is not installed (pip install qwix)"
    if name in transformer_engine.RECIPES:
        reason = transformer_engine.missing_reason()
    if reason is not None:
        print(f"{reason}, so the row {name!r} is missing")
    return reason is None


# Models
# --------------------------------------------------------------------------------------


class Blocks(nn.Module):
    """Blocks of a Llama in sequence, `[batch, positions, width]` to the same."""

    config: LlamaConfig
    dot_general_cls: Any = None

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Apply the blocks."""
        rotation = rotations(x.shape[1], self.config.head_size, self.config.rope_theta)
        for i in range(self.config.layers):
            block = Block(
                self.config, "bfloat16", self.dot_general_cls, name=f"block_{i}"
            )
            x, _ = block(x, rotation)
        return x


class MLP(nn.Module):
    """`W_2 relu(W_1 x)`, with the parameters of `models.nets.mlp.MLP`."""

    features: tuple[int, int]
    dot_general_cls: Any = None

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Apply the layers."""
        first, second = (
            nn.Dense(
                features,
                use_bias=False,
                dtype=jnp.bfloat16,
                name=f"dense_{index}",
                dot_general_cls=self.dot_general_cls,
            )
            for index, features in enumerate(self.features)
        )
        return second(nn.relu(first(x)))


def _unchanged(params: Any) -> Any:
    return params


@dataclass(frozen=True)
class Peer:
    """A model of another library.

    Attributes:
      model: A Linen module.
      joined: Returns the parameters of the plain model as this one's.
      separated: Returns this model's parameters, or their gradients, as the plain
        model's.
      context: Returns the context in which the model is traced.
    """

    model: Any
    joined: Callable[[Any], Any] = _unchanged
    separated: Callable[[Any], Any] = _unchanged
    context: Callable[[], contextlib.AbstractContextManager[None]] = (
        contextlib.nullcontext
    )


def blocks_of(name: str, config: LlamaConfig) -> Peer:
    """Return blocks of a Llama as a peer computes them."""
    if name in transformer_engine.RECIPES:
        names = transformer_engine.BlockNames(config)
        return Peer(
            transformer_engine.Blocks(config),
            names.joined,
            names.separated,
            partial(transformer_engine.quantizing, name),
        )
    return _with_products(name, partial(Blocks, config))


def mlp_of(name: str, shape: GemmShape) -> Peer:
    """Return the MLP of a shape (tokens, d, d_ff) as a peer computes it."""
    if name in transformer_engine.RECIPES:
        return Peer(
            transformer_engine.MLP(shape.n),
            transformer_engine.joined_mlp,
            transformer_engine.separated_mlp,
            partial(transformer_engine.quantizing, name),
        )
    return _with_products(name, partial(MLP, (shape.n, shape.k)))


def _with_products(name: str, make: Callable[..., nn.Module]) -> Peer:
    """Return a plain model whose products are a peer's."""
    if name == FLAX:
        return Peer(make(fp8_ops.Fp8DirectDotGeneralOp))
    import qwix

    # E4M3 forward and E5M2 gradients.
    rule = qwix.QtRule(
        op_names=("dot_general",),
        weight_qtype=jnp.float8_e4m3fn,
        act_qtype=jnp.float8_e4m3fn,
        bwd_qtype=jnp.float8_e5m2,
        disable_channelwise_axes=True,
    )
    return Peer(qwix.quantize_model(make(), qwix.QtProvider([rule])))


# Candidates
# --------------------------------------------------------------------------------------


def make_peer(peer: Peer, draw: Draw) -> Candidate:
    """Return both passes of a peer's model, compiled.

    Gradients with respect to scales that are delayed are the next scales. The first
    call has none that fit, so the timed calls take those that it returned.
    """

    def prepare(key: Array) -> tuple[Any, ...]:
        params, x, g = draw(key)
        with peer.context():
            state = peer.model.init(key, x)
        return (
            peer.joined(params),
            {name: values for name, values in state.items() if name != "params"},
            x,
            g,
        )

    def applied(params: Any, state: Any, x: Array) -> Array:
        y: Array = peer.model.apply({"params": params, **state}, x)
        return y

    def passes(params: Any, state: Any, x: Array, g: Array) -> dict[str, Any]:
        with peer.context():
            y, pull = jax.vjp(applied, params, state, x)
            dparams, new_state, dx = pull(g)
        return {"y": y, "dx": dx, "dparams": dparams, "state": new_state}

    key = jax.random.key(0)
    given = jax.eval_shape(prepare, key)
    compiled, seconds = timing.compile_timed(jax.jit(passes), *given)
    params, state, x, g = jax.jit(prepare)(key)
    state = compiled(params, state, x, g)["state"]
    args = params, state, x, g

    def outputs() -> dict[str, Any]:
        found = compiled(*args)
        return {
            "y": found["y"],
            "dx": found["dx"],
            "dparams": peer.separated(found["dparams"]),
        }

    return Candidate(compiled, args, compiled, seconds, outputs)
