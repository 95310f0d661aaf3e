"""A decoder-only Transformer whose MLPs are mixtures of experts: a router sends each token to a few of many SwiGLUs.

    p = softmax(W_router n)                                     float32                          n = RMSNorm(x)
    x = x + sum over the chosen e of p[e] W_down[e] (silu(W_gate[e] n) * W_up[e] n)  [+ a shared SwiGLU of n]

It is a `models.llama` otherwise, in plain Flax without low precision. Tokens are sorted by expert and multiplied by
`lax.ragged_dot`, so that none is dropped. The gradients of the sort and of its inverse are gathers, too, because a
scatter adds in another order each time. Two penalties change gradients, but not the losses that the model returns:

    balance = E sum over e of (share of choices that are e) * (mean of p[e])        z = mean of logsumexp(W_router n)**2

Sources: Muennighoff et al. 2024, "OLMoE"; Yang et al. 2025, "Qwen3 Technical Report"; Fedus et al. 2021, "Switch
Transformers" (balance); Zoph et al. 2022, "ST-MoE" (z).
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from models.keeping import CHOICE
from models.llama import Block, Llama, LlamaConfig, Matrix, gated, initial

Normalized = Literal["all", "chosen"]


@dataclass(frozen=True)
class MoeConfig(LlamaConfig):
    """Size of a `Moe`, and how it runs: a Llama whose MLP has experts of `hidden` values each.

    Attributes:
      experts, chosen: Number of experts, and of those that a token goes through.
      shared: Hidden values of a SwiGLU for all tokens; 0 is none.
      normalized: Weights of the chosen experts: "all" takes the softmax over all experts (OLMoE), "chosen" divides the
        chosen ones by their sum (Qwen3).
      balance, z_loss: Factors of the penalties, whose mean over the layers counts.

    Raises:
      ValueError: as `LlamaConfig`; there are fewer experts than chosen ones, or a factor is negative.
    """

    experts: int = 8
    chosen: int = 2
    shared: int = 0
    normalized: Normalized = "all"
    balance: float = 0.01
    z_loss: float = 0.001

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.chosen <= self.experts:
            raise ValueError(f"chosen={self.chosen} of experts={self.experts}; choose 1 to {self.experts} of them")
        for name in ("shared", "balance", "z_loss"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}={getattr(self, name)} must be zero or positive")
        if self.normalized not in get_args(Normalized):
            raise ValueError(f"normalized={self.normalized!r} is unknown; use one of {list(get_args(Normalized))}")

    @property
    def columns(self) -> int:
        """As in `LlamaConfig`: those of the router, and of the experts that a token goes through."""
        return super().columns + 3 * ((self.chosen - 1) * self.hidden + self.shared) + self.experts


MOES = {
    "moe-tiny": MoeConfig(
        layers=2, width=128, heads=4, kv_heads=2, hidden=128, context=128, qk_norm="heads", normalized="chosen"
    ),
    "moe-109m": MoeConfig(
        layers=8, width=512, heads=8, kv_heads=8, hidden=512, context=1024, qk_norm="heads", experts=16, chosen=4
    ),
    "olmoe-1b-7b": MoeConfig(
        layers=16, width=2048, heads=16, kv_heads=16, hidden=1024, context=4096, vocabulary=50_304, head="untied",
        remat="auto", qk_norm="all", experts=64, chosen=8,
    ),
    "qwen3-30b-a3b": MoeConfig(
        layers=48, width=2048, heads=32, kv_heads=4, hidden=768, context=40_960, vocabulary=151_936, head="untied",
        rope_theta=1_000_000.0, norm_eps=1e-6, remat="auto", head_dim=128, qk_norm="heads", experts=128, chosen=8,
        normalized="chosen", balance=0.001, z_loss=0.0,
    ),
}  # fmt: skip


class Routed(NamedTuple):
    """Choices of a router for t tokens.

    Attributes:
      chosen: Experts of each token, int32 `[t, chosen]`.
      weights: Their weights, float32 `[t, chosen]`.
      sizes: Number of rows of each expert, int32 `[experts]`.
      order: The row, of token `row // chosen`, at each place of the rows that are sorted by expert.
      place: Its inverse: the place of each row.
      penalty: Weighted sum of both penalties, float32.
    """

    chosen: jax.Array
    weights: jax.Array
    sizes: jax.Array
    order: jax.Array
    place: jax.Array
    penalty: jax.Array


def route(logits: jax.Array, config: MoeConfig) -> Routed:
    """Return the choices for the logits of a router, float32 `[t, experts]`.

    >>> config = MoeConfig(layers=1, width=2, heads=1, kv_heads=1, hidden=1, context=1, experts=3)
    >>> routed = route(jnp.log(jnp.array([[0.2, 0.3, 0.5], [0.6, 0.3, 0.1]])), config)
    >>> routed.chosen.tolist(), routed.sizes.tolist(), routed.order.tolist()
    ([[2, 1], [0, 1]], [1, 2, 1], [2, 1, 3, 0])
    """
    probabilities = jax.nn.softmax(logits)
    chosen = checkpoint_name(lax.top_k(lax.stop_gradient(probabilities), config.chosen)[1], CHOICE)
    # Masks instead of indices: the gradient of a masked sum is not a scatter, and both fuse.
    is_chosen = chosen[..., None] == jnp.arange(config.experts)
    weights = jnp.sum(jnp.where(is_chosen, probabilities[:, None], 0.0), axis=-1)
    if config.normalized == "chosen":
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    sizes = jnp.sum(is_chosen, axis=(0, 1), dtype=jnp.int32)
    order = jnp.argsort(chosen.reshape(-1))
    place = jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=order.dtype), unique_indices=True)
    balance = config.experts * jnp.sum(sizes / chosen.size * jnp.mean(probabilities, axis=0))
    z_loss = jnp.mean(jax.nn.logsumexp(logits, axis=-1) ** 2)
    return Routed(chosen, weights, sizes, order, place, config.balance * balance + config.z_loss * z_loss)


@jax.custom_vjp
def dispatch(x: jax.Array, order: jax.Array, place: jax.Array) -> jax.Array:
    """Return tokens `[t, width]` as rows `[t * chosen, width]`, sorted by expert.

    >>> dispatch(jnp.array([[1.0], [2.0]]), jnp.array([2, 1, 3, 0]), jnp.array([3, 1, 0, 2]))[:, 0].tolist()
    [2.0, 1.0, 2.0, 1.0]
    """
    return _rows(x, order // (order.size // len(x)))


def _dispatch_back(residuals: tuple[jax.Array, int], g: jax.Array) -> tuple[jax.Array, None, None]:
    place, tokens = residuals
    of_tokens = _rows(g, place).reshape(tokens, -1, g.shape[-1])
    return jnp.sum(of_tokens, axis=1, dtype=jnp.float32).astype(g.dtype), None, None


dispatch.defvjp(lambda x, order, place: (dispatch(x, order, place), (place, len(x))), _dispatch_back)


@jax.custom_vjp
def collect(rows: jax.Array, order: jax.Array, place: jax.Array) -> jax.Array:
    """Return rows in the order of their tokens again.

    >>> rows, order, place = jnp.array([[2.0], [1.0], [2.0], [1.0]]), jnp.array([2, 1, 3, 0]), jnp.array([3, 1, 0, 2])
    >>> collect(rows, order, place)[:, 0].tolist()
    [1.0, 1.0, 2.0, 2.0]
    """
    return _rows(rows, place)


collect.defvjp(
    lambda rows, order, place: (collect(rows, order, place), order), lambda order, g: (_rows(g, order), None, None)
)


def _rows(x: jax.Array, index: jax.Array) -> jax.Array:
    return x.at[index].get(mode="promise_in_bounds")


class MoeBlock(Block):
    """A block of a Llama with a mixture of experts as its MLP; with `mutable="intermediates"` it tells its choices."""

    config: MoeConfig

    def _mlp(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        config, flat = self.config, x.reshape(-1, x.shape[-1])
        # TF32, the default of float32 on GPUs, has the bits of BF16.
        router = nn.Dense(
            config.experts, use_bias=False, dtype=jnp.float32, precision=lax.Precision.HIGHEST,
            kernel_init=initial(config), name="router",
        )  # fmt: skip
        routed = route(router(flat.astype(jnp.float32)), config)
        self.sow("intermediates", "chosen", routed.chosen)
        gate_up = Matrix((config.experts, config.width, 2 * config.hidden), initial(config), name="expert_gate_up")()
        down = Matrix((config.experts, config.hidden, config.width), initial(config, "residual"), name="expert_down")()
        multiply = lambda rows, matrix: lax.ragged_dot(rows, matrix.astype(x.dtype), routed.sizes)
        rows = dispatch(flat, routed.order, routed.place)
        gate, up = jnp.split(multiply(rows, gate_up), 2, axis=-1)
        hidden = gated(gate, up, config.activation)
        back = collect(multiply(hidden, down), routed.order, routed.place).astype(jnp.float32)
        y = jnp.sum(back.reshape(len(flat), config.chosen, -1) * routed.weights[..., None], axis=1).astype(x.dtype)
        shared = self._swiglu(x, config.shared) if config.shared else 0
        return y.reshape(x.shape) + shared, routed.penalty


class Moe(Llama):
    """A `Llama` with a mixture of experts in each block; the penalties add to the gradient of its losses."""

    block: ClassVar[type[Block]] = MoeBlock
    config: MoeConfig
