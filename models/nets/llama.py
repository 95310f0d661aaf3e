"""A decoder-only Transformer of the Llama family: RMSNorm, rotary positions,
grouped-query attention, SwiGLU.

    x = E[token]
    x = x + W_o attention(rotate(W_q n), rotate(W_k n), W_v n)  n = RMSNorm(x)
    x = x + W_down (silu(W_gate n) * W_up n)  n = RMSNorm(x)  (layers times)
    logits = W_head RMSNorm(x)  W_head = Eᵀ if the head is tied

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
import numpy as np
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.checks import check_choice
from tcfp_jax.remat import checkpoint_in_fp8

from .adapters import Adapter
from .attention import (
    CACHE,
    Start,
    causal_attention,
    kept,
    kept_positions,
)
from .keeping import policy
from .losses import (
    IGNORED,
    Objective,
    capped,
    head_losses,
    head_objective,
)
from .meshes import looked_up, split_batch
from .positions import Stretch, document_places, rotate, rotations
from .shapes import ComputeDtype, LlamaConfig, kept_names, kept_of_head

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
        start: Start = None,
    ) -> tuple[jax.Array, jax.Array | None]:
        """Apply causal attention and the MLP, each around a residual connection; also
        return the MLP's penalty.

        Args:
          x: Activations.
          rotation: Rotation of each position, `models.nets.positions.rotations`.
          mask: Tokens that a token sees, besides causality; see `causal_attention`.
          kind: Index into a leading axis of rotation and mask; None if they have none.
          start: Position of the first token, with which keys and values are kept.
        """
        if kind is not None and mask is not None:
            rotation = rotation[kind]
            mask = mask[kind]
        x = self._attend(split_batch(x), rotation, mask, start)
        y, penalty = self._mlp(self._norm("mlp_norm")(x))
        return x + self._after("mlp_post_norm", y), penalty

    def _attend(
        self, x: jax.Array, rotation: jax.Array, mask: jax.Array | None, start: Start
    ) -> jax.Array:
        config = self.config
        normed = self._norm("attention_norm")(x)
        query = self._dense("query", config.heads * config.head_size)(normed)
        key = self._dense("key", config.kv_heads * config.head_size)(normed)
        value = self._dense("value", config.kv_heads * config.head_size)(normed)
        query = rotate(self._normed_heads("query", query), rotation)
        key = rotate(self._normed_heads("key", key), rotation)
        value = value.reshape(*x.shape[:-1], config.kv_heads, config.head_size)
        key, value = kept(self, key, value, start)
        attended = causal_attention(
            checkpoint_name(query, "query"),
            checkpoint_name(key, "key"),
            checkpoint_name(value, "value"),
            config.attention,
            mask=mask,
            scale=config.attention_scale,
            cap=config.attention_cap,
            start=start,
        )
        attended = attended.reshape(*x.shape[:-1], config.heads * config.head_size)
        output = self._dense("output", config.width, scaled="residual")(attended)
        output = self._after("attention_post_norm", output)
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
        if self.config.qk_norm == "heads":
            values = self._norm(f"{name}_norm")(values)
        return values

    def _mlp(self, x: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Return the SwiGLU of normalized activations, and None for the penalty of a
        router.
        """
        return self._swiglu(x, self.config.hidden), None

    def _swiglu(self, x: jax.Array, hidden: int) -> jax.Array:
        gate = self._dense("gate", hidden)(x)
        up = self._dense("up", hidden)(x)
        down = self._dense("down", self.config.width, scaled="residual")
        return down(gated(gate, up, self.config.activation))

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
    smaller = (2 * config.layers) ** 0.5 if scaled == "residual" else 1
    return nn.initializers.normal(INITIAL_DEVIATION / smaller)


def gated(gate: jax.Array, up: jax.Array, activation: str = "silu") -> jax.Array:
    """Return `activation(gate) * up`, with both named for the policy of a remat."""
    gate = checkpoint_in_fp8(checkpoint_name(gate, "gate"), "gate_fp8")
    up = checkpoint_in_fp8(checkpoint_name(up, "up"), "up_fp8")
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
    targets of `IGNORED` have no loss. With `start`, the position of the first token,
    keys and values stay in the collection "cache", which must be mutable. With
    `objective` the result is this function of the losses
    (`models.nets.losses.head_objective`), which can be differentiated.

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
        start: Start = None,
        objective: Objective | None = None,
    ) -> Any:
        """Predict the token after each position, or return the loss of the
        prediction.
        """
        config = self.config
        positions = tokens.shape[-1]
        check_choice("dtype", self.dtype, get_args(ComputeDtype))
        if positions > config.context:
            raise ValueError(
                f"{positions} positions exceed the model's context of {config.context},"
                " beyond which it has no rotations; shorten the sequence"
            )
        normal = nn.initializers.normal(INITIAL_DEVIATION)
        dtype = jnp.dtype(self.dtype)
        # Rounded after the lookup, so that the gradients of a frequent token are added
        # in float32.
        embedding = nn.Embed(
            config.vocabulary, config.width, embedding_init=normal, name="embedding"
        )
        x = looked_up(embedding.embedding, tokens, dtype)
        if config.embedding_scale != 1:
            x = x * jnp.asarray(config.embedding_scale, dtype)
        keys = kept_positions(self, positions)
        placed = places(config, positions, documents, start, keys)
        x, penalties = layers_of(config, self.dtype, self.block)(x, *placed)
        x = nn.RMSNorm(epsilon=config.norm_eps, dtype=dtype, name="final_norm")(x)
        if config.head == "tied":
            matrix = embedding.embedding.T
        else:
            matrix = Matrix((config.width, config.vocabulary), name="head")()
        if targets is None:
            logits = (x @ matrix.astype(dtype)).astype(jnp.float32)
            return capped(logits, config.logit_cap)
        kept = kept_of_head(config.remat)
        cap = config.logit_cap
        penalty = 0.0 if penalties is None else only_gradient(penalties.mean())
        if objective is not None:
            value, other = head_objective(
                x, matrix, targets, objective, kept=kept, cap=cap
            )
            return value + penalty, other
        ignore = None if documents is None else IGNORED
        losses = head_losses(x, matrix, targets, kept=kept, ignore=ignore, cap=cap)
        return losses if penalties is None else losses + penalty


def only_gradient(penalty: jax.Array) -> jax.Array:
    """Return zero with the gradient of a penalty, so that losses stay those of the
    tokens.
    """
    return penalty - jax.lax.stop_gradient(penalty)


def places(
    config: LlamaConfig,
    positions: int,
    documents: jax.Array | None,
    start: Start,
    keys: int,
) -> tuple[Any, ...]:
    """Return the arguments of `Block` next to x.

    They are rotations, a mask and kinds of layers if they are needed, and `start`.
    Positions start again at each document, and a token sees its own document alone. If
    layers have a window, rotations and masks have a leading axis: all positions, or the
    window. Kinds `[layers]` are indices of it.

    Args:
      config: Size of the model.
      positions: Length of the sequences.
      documents: Number of the document of each token, `[batch, positions]`; None is a
        single one.
      start: Position of the first token; None is 0.
      keys: Number of positions that tokens may see.
    """
    placed: int | jax.Array = positions
    order = jnp.arange(positions)
    mask = None
    if start is not None:
        order = placed = start + order
    if documents is not None:
        placed, mask = document_places(documents)
    stretch = Stretch(
        config.rope_factor, config.rope_original, config.rope_low, config.rope_high
    )
    rotation = rotations(placed, config.head_size, config.rope_theta, stretch)
    if config.window is None:
        return rotation, mask, None, start
    local = rotation
    if config.local_theta is not None:
        local = rotations(placed, config.head_size, config.local_theta)
    near = order[:, None] - jnp.arange(keys) < config.window
    if mask is None:
        mask = jnp.ones((1, 1, positions, keys), bool)
    kinds = np.arange(1, config.layers + 1) % config.global_every != 0
    return (
        jnp.stack([rotation, local]),
        jnp.stack([mask, mask & near]),
        jnp.asarray(kinds, jnp.int32),
        start,
    )


def layers_of(
    config: LlamaConfig, dtype: ComputeDtype, block: type[Block] = Block
) -> nn.Module:
    """Return all blocks in sequence as one module whose parameters have a leading axis
    of layers.
    """
    layers = nn.scan(
        _rematerialised(config, block),
        variable_axes={"params": 0, "intermediates": 0, CACHE: 0},
        split_rngs={"params": True},
        in_axes=(
            nn.broadcast
            if config.window is None
            else (nn.broadcast, nn.broadcast, 0, nn.broadcast)
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
