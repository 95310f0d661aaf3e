"""A decoder-only Transformer of the Llama family: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

    x = E[token]
    x = x + W_o attention(rotate(W_q n), rotate(W_k n), W_v n)                  n = RMSNorm(x)
    x = x + W_down (silu(W_gate n) * W_up n)                                    n = RMSNorm(x)      (layers times)
    logits = W_head RMSNorm(x)                                                  W_head = Eᵀ if the head is tied

It is plain Flax, like anybody's model, without low precision: `models.families` converts it. Layers are scanned, so
that a program has one block at any depth. `remat` chooses the values that a block keeps for its backward pass, of which
only gate and up may be kept in FP8. Matrices have no bias. Parameters are float32 and activations `dtype`; norms,
rotations and softmax compute in float32.

Sources: Touvron et al. 2023, "Llama 2"; Grattafiori et al. 2024, "The Llama 3 Herd of Models" (sizes; without the
stretched frequencies by which Llama 3.1 and 3.2 reach a context of 131072).
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from models import BYTES, ComputeDtype
from models.attention import Attention, causal_attention
from models.keeping import check_remat, kept_names, kept_of_head, policy
from models.losses import head_losses
from models.meshes import looked_up, split_batch
from tcfp_jax.remat import checkpoint_in_fp8

Head = Literal["tied", "untied"]
QKNorm = Literal["none", "heads", "all"]
Loop = Literal["scan", "unrolled"]
Scaled = Literal["plain", "residual"]
INITIAL_DEVIATION = 0.02


@dataclass(frozen=True)
class LlamaConfig:
    """Size of a `Llama`, and how it runs.

    Attributes:
      layers, width, heads: Number of blocks, model dimension d, query heads.
      kv_heads: Heads of keys and values; each serves heads / kv_heads query heads.
      hidden: Values between the matrices of a SwiGLU.
      context: Longest sequence, and rows of the table of rotations.
      vocabulary: Rows of the embedding table, at least 256.
      head_dim: Values of one head of attention; None is d / heads.
      qk_norm: RMSNorms of queries and keys before their rotation: "heads" normalizes each head by one scale for all of
        them (Qwen3), "all" normalizes all heads together (OLMoE).
      head: "tied" multiplies by the embedding table; "untied" has a matrix of its own.
      rope_theta: Base of the wavelengths of rotary positions.
      norm_eps: Constant added to mean squares.
      attention: Argument of `models.attention.causal_attention`; "auto" is flash attention if the device has it.
      remat: Values that a block keeps for its backward pass. "none" recomputes nothing. "products" recomputes
        everything except products and attention. "block" keeps only the block's input, and of the loss only the head's
        input. "auto" is a request: `models.train` and the benchmarks keep as much as fits, and the model alone is
        "block". Names joined by "+" keep these values, such as "attended+gate_fp8": those of `KEPT_NAMES`, gate_fp8 and
        up_fp8 for copies in FP8, and "tcfp_activation" for inputs that products quantized.
      loop: "scan" compiles one block. "unrolled" compiles all, which takes two to three times as long, for steps that
        copy no kept value into a stack and out of it. Parameters are the same.

    Raises:
      ValueError: a size is below 1, heads do not divide the width or have an odd size, kv_heads do not divide heads,
        the vocabulary is below 256, theta or epsilon is not positive, or a choice is unknown.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    context: int
    vocabulary: int = BYTES
    head: Head = "tied"
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    attention: Attention = "auto"
    remat: str = "none"
    loop: Loop = "scan"
    head_dim: int | None = None
    qk_norm: QKNorm = "none"

    def __post_init__(self) -> None:
        if min(self.layers, self.width, self.heads, self.kv_heads, self.hidden, self.context) < 1:
            raise ValueError(f"{self} has a size below 1; every size must be positive")
        if self.head_dim is None and self.width % self.heads:
            raise ValueError(f"heads={self.heads} does not divide width={self.width}; choose a divisor, or head_dim")
        if self.head_size < 1 or self.head_size % 2:
            raise ValueError(
                f"heads={self.heads} of width={self.width} have {self.head_size} values each, but rotary positions "
                "turn pairs; choose heads of an even size"
            )
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads={self.kv_heads} does not divide heads={self.heads}; choose a divisor")
        if self.vocabulary < BYTES:
            raise ValueError(f"vocabulary={self.vocabulary} is below the {BYTES} byte values; raise it")
        for name in ("rope_theta", "norm_eps"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} must be positive")
        for name, allowed in dict(head=Head, attention=Attention, loop=Loop, qk_norm=QKNorm).items():
            if getattr(self, name) not in get_args(allowed):
                raise ValueError(f"{name}={getattr(self, name)!r} is unknown; use one of {list(get_args(allowed))}")
        check_remat(self.remat)

    @property
    def head_size(self) -> int:
        """Values of one head of attention."""
        return self.width // self.heads if self.head_dim is None else self.head_dim


LLAMAS = {
    "llama-tiny": LlamaConfig(layers=2, width=128, heads=4, kv_heads=2, hidden=384, context=128),
    "llama-124m": LlamaConfig(
        layers=12, width=768, heads=12, kv_heads=12, hidden=2048, context=1024, vocabulary=50304
    ),
    "llama-1b": LlamaConfig(
        layers=16, width=2048, heads=32, kv_heads=8, hidden=8192, context=8192, vocabulary=128_256,
        rope_theta=500_000.0, remat="auto",
    ),
    "llama-8b": LlamaConfig(
        layers=32, width=4096, heads=32, kv_heads=8, hidden=14_336, context=8192, vocabulary=128_256, head="untied",
        rope_theta=500_000.0, remat="auto",
    ),
}  # fmt: skip


class Block(nn.Module):
    """One block, `[batch, positions, width]` to the same, with the signature that `nn.scan` needs.

    `dot_general_cls` is passed to its `nn.Dense` layers.
    """

    config: LlamaConfig
    dtype: ComputeDtype
    dot_general_cls: Any = None

    @nn.compact
    def __call__(self, x: jax.Array, rotation: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Apply causal attention and the MLP, each around a residual connection; also return the MLP's penalty."""
        x = self._attend(split_batch(x), rotation)
        y, penalty = self._mlp(self._norm("mlp_norm")(x))
        return x + y, penalty

    def _attend(self, x: jax.Array, rotation: jax.Array) -> jax.Array:
        config = self.config
        normed = self._norm("attention_norm")(x)
        query, key, value = (
            self._dense(name, heads * config.head_size)(normed)
            for name, heads in (("query", config.heads), ("key", config.kv_heads), ("value", config.kv_heads))
        )
        query, key = (self._normed_heads(name, values) for name, values in (("query", query), ("key", key)))
        value = value.reshape(*x.shape[:-1], config.kv_heads, config.head_size)
        query, key = checkpoint_name(rotate(query, rotation), "query"), checkpoint_name(rotate(key, rotation), "key")
        attended = causal_attention(query, key, checkpoint_name(value, "value"), config.attention)
        attended = attended.reshape(*x.shape[:-1], config.heads * config.head_size)
        return checkpoint_name(
            x + self._dense("output", config.width, scaled="residual")(attended), "attention_residual"
        )

    def _normed_heads(self, name: str, values: jax.Array) -> jax.Array:
        """Return queries or keys as `[batch, positions, heads, values]`, normalized as the config says."""
        if self.config.qk_norm == "all":
            values = self._norm(f"{name}_norm")(values)
        values = values.reshape(*values.shape[:-1], -1, self.config.head_size)
        return self._norm(f"{name}_norm")(values) if self.config.qk_norm == "heads" else values

    def _mlp(self, x: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Return the SwiGLU of normalized activations, and None for the penalty of a router."""
        return self._swiglu(x, self.config.hidden), None

    def _swiglu(self, x: jax.Array, hidden: int) -> jax.Array:
        gate, up = (self._dense(name, hidden)(x) for name in ("gate", "up"))
        return self._dense("down", self.config.width, scaled="residual")(gated(gate, up))

    def _norm(self, name: str) -> nn.RMSNorm:
        return nn.RMSNorm(epsilon=self.config.norm_eps, dtype=jnp.dtype(self.dtype), name=name)

    def _dense(self, name: str, features: int, *, scaled: Scaled = "plain") -> nn.Dense:
        return nn.Dense(
            features, use_bias=False, dtype=jnp.dtype(self.dtype), kernel_init=initial(self.config, scaled), name=name,
            dot_general_cls=self.dot_general_cls,
        )  # fmt: skip


def initial(config: LlamaConfig, scaled: Scaled = "plain") -> nn.initializers.Initializer:
    """Return the initializer of a matrix; those that write to the residual stream start smaller."""
    # Otherwise its variance would grow with depth.
    return nn.initializers.normal(INITIAL_DEVIATION / ((2 * config.layers) ** 0.5 if scaled == "residual" else 1))


def gated(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Return `silu(gate) * up`, with both named for the policy of a remat."""
    gate, up = (
        checkpoint_in_fp8(checkpoint_name(value, name), f"{name}_fp8") for name, value in (("gate", gate), ("up", up))
    )
    return nn.silu(gate) * up


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

    With `targets`, integers `[batch, positions]`, the result is the cross-entropy of each, float32 `[batch,
    positions]`, of which the mean can be differentiated. Logits in BF16 then exist together only if blocks keep
    all their products, too.

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
    def __call__(self, tokens: jax.Array, targets: jax.Array | None = None) -> jax.Array:
        """Predict the token after each position, or return the loss of the prediction."""
        config, positions = self.config, tokens.shape[-1]
        if self.dtype not in get_args(ComputeDtype):
            raise ValueError(f"dtype={self.dtype!r} is unknown; use one of {list(get_args(ComputeDtype))}")
        if positions > config.context:
            raise ValueError(
                f"{positions} positions exceed the model's context of {config.context}, beyond which it has no "
                "rotations; shorten the sequence"
            )
        normal, dtype = nn.initializers.normal(INITIAL_DEVIATION), jnp.dtype(self.dtype)
        # Rounded after the lookup, so that the gradients of a frequent token are added in float32.
        embedding = nn.Embed(config.vocabulary, config.width, embedding_init=normal, name="embedding")
        x = looked_up(embedding.embedding, tokens, dtype)
        rotation = rotations(positions, config.head_size, config.rope_theta)
        x, penalties = layers_of(config, self.dtype, self.block)(x, rotation)
        x = nn.RMSNorm(epsilon=config.norm_eps, dtype=dtype, name="final_norm")(x)
        if config.head == "tied":
            matrix = embedding.embedding.T
        else:
            matrix = Matrix((config.width, config.vocabulary), name="head")()
        if targets is not None:
            losses = head_losses(x, matrix, targets, kept=kept_of_head(config.remat))
            return losses if penalties is None else losses + only_gradient(penalties.mean())
        return (x @ matrix.astype(dtype)).astype(jnp.float32)


def only_gradient(penalty: jax.Array) -> jax.Array:
    """Return zero with the gradient of a penalty, so that losses stay those of the tokens."""
    return penalty - jax.lax.stop_gradient(penalty)


def layers_of(config: LlamaConfig, dtype: ComputeDtype, block: type[Block] = Block) -> nn.Module:
    """Return all blocks in sequence as one module whose parameters have a leading axis of layers."""
    layers = nn.scan(
        _rematerialised(config, block), variable_axes={"params": 0, "intermediates": 0}, split_rngs={"params": True},
        in_axes=nn.broadcast, length=config.layers, unroll=config.layers if config.loop == "unrolled" else 1,
    )  # fmt: skip
    return layers(config, dtype, name="layers")


def rotations(positions: int, size: int, theta: float) -> jax.Array:
    """Return cosines and sines of the angles `position * theta**(-2 i / size)`, float32 `[2, positions, size / 2]`.

    >>> bool(jnp.allclose(rotations(2, 4, 100.0)[0, 1], jnp.cos(jnp.array([1.0, 0.1]))))
    True
    """
    wavelengths = theta ** (-jnp.arange(0, size, 2, dtype=jnp.float32) / size)
    angles = jnp.arange(positions, dtype=jnp.float32)[:, None] * wavelengths
    return jnp.stack([jnp.cos(angles), jnp.sin(angles)])


def rotate(x: jax.Array, rotation: jax.Array) -> jax.Array:
    """Turn the pairs `(x[i], x[i + d/2])` by the angles of their positions; `[..., positions, heads, d]`.

    The pairs match Llama's checkpoints in Transformers. The sum is float32, the result has the dtype of x.
    """
    cos, sin = rotation[:, :, None]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def _rematerialised(config: LlamaConfig, block: type[Block]) -> Any:
    """Return a block with a backward pass that recomputes as `config.remat` says."""
    if config.remat == "none":
        return block
    # XLA cannot merge the recomputation with the forward pass if each is a loop of its own.
    kept = frozenset(kept_names(config.remat))
    return nn.remat(block, policy=policy(kept), prevent_cse=config.loop == "unrolled")
