"""A decoder-only Transformer of the Llama family: RMSNorm, rotary positions,
grouped-query attention, SwiGLU.

    x = E[token]
    x = x + W_o attention(rotate(W_q n), rotate(W_k n), W_v n)                  n = RMSNorm(x)
    x = x + W_down (silu(W_gate n) * W_up n)                                    n = RMSNorm(x)      (layers times)
    logits = W_head RMSNorm(x)                                                  W_head = Eᵀ if the head is tied

Options of `LlamaConfig` make it a Qwen or a Gemma. Gemma's norms multiply by `1 + w`,
which is the scale here.

It is plain Flax, like anybody's model, without low precision: `models.nets.families`
converts it. Layers are scanned, so that a program has one block at any depth. `remat`
chooses the values that a block keeps for its backward pass, of which only gate and up
may be kept in FP8. Parameters are float32 and activations `dtype`; norms, rotations and
softmax compute in float32.

Sources: Touvron et al. 2023, "Llama 2"; `models.nets.shapes`.
"""

import functools
from collections.abc import Callable
from typing import Any, ClassVar, Literal, get_args

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from models import ComputeDtype
from models.nets.adapters import Adapter
from models.nets.attention import causal_attention
from models.nets.keeping import kept_names, kept_of_head, policy
from models.nets.losses import IGNORED, capped, head_losses
from models.nets.meshes import looked_up, split_batch
from models.nets.positions import places, rotate, rotations
from models.nets.shapes import LLAMAS, LlamaConfig, Loop
from tcfp_jax.remat import checkpoint_in_fp8

__all__ = [
    "LLAMAS",
    "Block",
    "Llama",
    "LlamaConfig",
    "Loop",
    "layers_of",
    "rotate",
    "rotations",
]

Scaled = Literal["plain", "residual"]
INITIAL_DEVIATION = 0.02
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": nn.silu,
    "gelu": functools.partial(nn.gelu, approximate=True),
}


class Block(nn.Module):
    """One block, `[batch, positions, width]` to the same, with the signature that
    `nn.scan` needs.

    `dot_general_cls` is passed to its `nn.Dense` layers.
    """

    config: LlamaConfig
    dtype: ComputeDtype
    dot_general_cls: Any = None

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        rotation: jax.Array,
        mask: jax.Array | None = None,
        kind: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array | None]:
        """Apply causal attention and the MLP, each around a residual connection; also
        return the MLP's penalty.

        Args:
          x: Activations.
          rotation: Of each position, `models.nets.positions.rotations`.
          mask: Tokens that a token sees, besides causality; see `causal_attention`.
          kind: Index into a leading axis of rotation and mask; None if they have none.
        """
        if kind is not None and mask is not None:
            rotation, mask = rotation[kind], mask[kind]
        x = self._attend(split_batch(x), rotation, mask)
        y, penalty = self._mlp(self._norm("mlp_norm")(x))
        return x + self._after("mlp_post_norm", y), penalty

    def _attend(
        self, x: jax.Array, rotation: jax.Array, mask: jax.Array | None
    ) -> jax.Array:
        config = self.config
        normed = self._norm("attention_norm")(x)
        query, key, value = (
            self._dense(name, heads * config.head_size)(normed)
            for name, heads in (
                ("query", config.heads),
                ("key", config.kv_heads),
                ("value", config.kv_heads),
            )
        )
        query, key = (
            self._normed_heads(name, values)
            for name, values in (("query", query), ("key", key))
        )
        value = value.reshape(*x.shape[:-1], config.kv_heads, config.head_size)
        query, key = (
            checkpoint_name(rotate(query, rotation), "query"),
            checkpoint_name(rotate(key, rotation), "key"),
        )
        attended = causal_attention(
            query,
            key,
            checkpoint_name(value, "value"),
            config.attention,
            mask=mask,
            scale=config.attention_scale,
            cap=config.attention_cap,
        )
        attended = attended.reshape(*x.shape[:-1], config.heads * config.head_size)
        output = self._after(
            "attention_post_norm",
            self._dense("output", config.width, scaled="residual")(attended),
        )
        return checkpoint_name(x + output, "attention_residual")

    def _after(self, name: str, x: jax.Array) -> jax.Array:
        """Return the result of attention or of the MLP, normalized as the config
        says.
        """
        return self._norm(name)(x) if self.config.post_norms == "on" else x

    def _normed_heads(self, name: str, values: jax.Array) -> jax.Array:
        """Return queries or keys as `[batch, positions, heads, values]`, normalized as
        the config says.
        """
        if self.config.qk_norm == "all":
            values = self._norm(f"{name}_norm")(values)
        values = values.reshape(*values.shape[:-1], -1, self.config.head_size)
        return (
            self._norm(f"{name}_norm")(values)
            if self.config.qk_norm == "heads"
            else values
        )

    def _mlp(self, x: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Return the SwiGLU of normalized activations, and None for the penalty of a
        router.
        """
        return self._swiglu(x, self.config.hidden), None

    def _swiglu(self, x: jax.Array, hidden: int) -> jax.Array:
        gate, up = (self._dense(name, hidden)(x) for name in ("gate", "up"))
        return self._dense("down", self.config.width, scaled="residual")(
            gated(gate, up, self.config.activation)
        )

    def _norm(self, name: str) -> nn.RMSNorm:
        return nn.RMSNorm(
            epsilon=self.config.norm_eps, dtype=jnp.dtype(self.dtype), name=name
        )

    def _dense(
        self, name: str, features: int, *, scaled: Scaled = "plain"
    ) -> Callable[[jax.Array], jax.Array]:
        biased = self.config.bias == "qkv" and name in ("query", "key", "value")
        dense = nn.Dense(
            features,
            use_bias=biased,
            dtype=jnp.dtype(self.dtype),
            kernel_init=initial(self.config, scaled),
            name=name,
            dot_general_cls=self.dot_general_cls,
        )
        if not self.config.lora:
            return dense
        adapter = Adapter(
            self.config.lora, features, self.dtype, name=f"{name}_adapter"
        )
        return lambda x: dense(x) + adapter(x)


def initial(
    config: LlamaConfig, scaled: Scaled = "plain"
) -> nn.initializers.Initializer:
    """Return the initializer of a matrix; those that write to the residual stream start
    smaller.
    """
    # Otherwise its variance would grow with depth.
    return nn.initializers.normal(
        INITIAL_DEVIATION / ((2 * config.layers) ** 0.5 if scaled == "residual" else 1)
    )


def gated(gate: jax.Array, up: jax.Array, activation: str = "silu") -> jax.Array:
    """Return `activation(gate) * up`, with both named for the policy of a remat."""
    gate, up = (
        checkpoint_in_fp8(checkpoint_name(value, name), f"{name}_fp8")
        for name, value in (("gate", gate), ("up", up))
    )
    return ACTIVATIONS[activation](gate) * up


class Matrix(nn.Module):
    """The parameter `kernel` of a product that the caller writes."""

    shape: tuple[int, ...]
    start: nn.initializers.Initializer = nn.initializers.normal(INITIAL_DEVIATION)

    @nn.compact
    def __call__(self) -> jax.Array:
        """Return the kernel, float32."""
        return self.param("kernel", self.start, self.shape, jnp.float32)


class Llama(nn.Module):
    """Tokens `[batch, positions]` to float32 logits `[batch, positions, vocabulary]`.

    With `targets`, integers `[batch, positions]`, the result is the cross-entropy of
    each, float32 `[batch, positions]`, of which the mean can be differentiated. Logits
    in BF16 then exist together only if blocks keep all their products, too. With
    `documents`, integers `[batch, positions]`, a token sees its own document alone, and
    targets of `IGNORED` have no loss.

    Attributes:
      config: The size, and how it runs.
      dtype: Dtype of activations and operands; logits are rounded to it once, too.

    Raises:
      ValueError: the sequence is longer than `config.context`, or the dtype is unknown.
    """

    block: ClassVar[type[Block]] = Block
    config: LlamaConfig
    dtype: ComputeDtype = "bfloat16"

    @nn.compact
    def __call__(
        self,
        tokens: jax.Array,
        targets: jax.Array | None = None,
        documents: jax.Array | None = None,
    ) -> jax.Array:
        """Predict the token after each position, or return the loss of the
        prediction.
        """
        config, positions = self.config, tokens.shape[-1]
        if self.dtype not in get_args(ComputeDtype):
            raise ValueError(
                f"dtype={self.dtype!r} is unknown; use one of"
                f" {list(get_args(ComputeDtype))}"
            )
        if positions > config.context:
            raise ValueError(
                f"{positions} positions exceed the model's context of {config.context},"
                " beyond which it has no rotations; shorten the sequence"
            )
        normal, dtype = nn.initializers.normal(INITIAL_DEVIATION), jnp.dtype(self.dtype)
        # Rounded after the lookup, so that the gradients of a frequent token are added
        # in float32.
        embedding = nn.Embed(
            config.vocabulary, config.width, embedding_init=normal, name="embedding"
        )
        x = looked_up(embedding.embedding, tokens, dtype)
        if config.embedding_scale != 1:
            x = x * jnp.asarray(config.embedding_scale, dtype)
        x, penalties = layers_of(config, self.dtype, self.block)(
            x, *places(config, positions, documents)
        )
        x = nn.RMSNorm(epsilon=config.norm_eps, dtype=dtype, name="final_norm")(x)
        if config.head == "tied":
            matrix = embedding.embedding.T
        else:
            matrix = Matrix((config.width, config.vocabulary), name="head")()
        if targets is not None:
            ignore, kept = (
                None if documents is None else IGNORED,
                kept_of_head(config.remat),
            )
            losses = head_losses(
                x, matrix, targets, kept=kept, ignore=ignore, cap=config.logit_cap
            )
            return (
                losses
                if penalties is None
                else losses + only_gradient(penalties.mean())
            )
        return capped((x @ matrix.astype(dtype)).astype(jnp.float32), config.logit_cap)


def only_gradient(penalty: jax.Array) -> jax.Array:
    """Return zero with the gradient of a penalty, so that losses stay those of the
    tokens.
    """
    return penalty - jax.lax.stop_gradient(penalty)


def layers_of(
    config: LlamaConfig, dtype: ComputeDtype, block: type[Block] = Block
) -> nn.Module:
    """Return all blocks in sequence as one module whose parameters have a leading axis
    of layers.
    """
    layers = nn.scan(
        _rematerialised(config, block),
        variable_axes={"params": 0, "intermediates": 0},
        split_rngs={"params": True},
        in_axes=(
            nn.broadcast if config.window is None else (nn.broadcast, nn.broadcast, 0)
        ),
        length=config.layers,
        unroll=config.layers if config.loop == "unrolled" else 1,
    )
    return layers(config, dtype, name="layers")


def _rematerialised(config: LlamaConfig, block: type[Block]) -> Any:
    """Return a block with a backward pass that recomputes as `config.remat` says."""
    if config.remat == "none":
        return block
    # XLA cannot merge the recomputation with the forward pass if each is a loop of its
    # own.
    kept = frozenset(kept_names(config.remat))
    return nn.remat(block, policy=policy(kept), prevent_cse=config.loop == "unrolled")
