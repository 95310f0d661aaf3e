"""Shapes of the networks: sizes, and the options by which GPT, Llama, Qwen and Gemma
differ. `models.nets.sizes` has the named ones.

Sources: Grattafiori et al. 2024, "The Llama 3 Herd of Models"; Yang et al. 2025, "Qwen3
Technical Report"; Gemma Team 2024, "Gemma 2"; 2025, "Gemma 3 Technical Report".
"""

from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, get_args

from pallas_kernels.checks import check_choice
from tcfp_jax.products.annotations import ACTIVATION_NAME

BYTES = 256  # number of tokens of plain text
ComputeDtype = Literal["float32", "bfloat16"]  # dtypes of activations
Attention = Literal["auto", "products", "xla", "cudnn"]
Head = Literal["tied", "untied"]
Loop = Literal["scan", "unrolled"]
Nonlinearity = Literal["silu", "gelu"]
Bias = Literal["none", "qkv"]
QKNorm = Literal["none", "heads", "all"]
Switch = Literal["off", "on"]
Normalized = Literal["all", "chosen"]
Copies = Literal["exact", "fp8"]

# Values that remat="products" keeps: inputs of the backward pass that only a product
# could make again.
KEPT_NAMES = ("query", "key", "value", "attended", "attention_residual", "gate", "up")
# The order in which values are worth their bytes: a byte of attention saves most.
# Products of one contraction save equally much for each byte, so small results come
# first; of gate and up a byte is kept instead of two. With "block" there are seven
# levels, of which at most four are compiled. "none" is not among them: a scan then
# stacks the float32 values of norms and activations, too (llama-1b on an H100: 261 ms
# instead of 236).
_ORDER: dict[Copies, tuple[str, ...]] = {
    "exact": ("attended", "key+value", "query", "attention_residual", "gate", "up"),
    "fp8": (
        "attended",
        "gate_fp8",
        "up_fp8",
        "key+value+query",
        "attention_residual",
        ACTIVATION_NAME,
    ),
}
# Fields of `LlamaConfig` that must be positive, and those that take a word.
_FACTORS = (
    "rope_theta",
    "norm_eps",
    "rope_factor",
    "rope_low",
    "embedding_scale",
    "attention_scale",
    "attention_cap",
    "logit_cap",
    "local_theta",
)
_CHOICES = dict(
    head=Head,
    attention=Attention,
    loop=Loop,
    bias=Bias,
    qk_norm=QKNorm,
    post_norms=Switch,
    activation=Nonlinearity,
)


@dataclass(frozen=True)
class GPTConfig:
    """Size of a `GPT`.

    Attributes:
      layers, width, heads: Number of blocks, model dimension d, attention heads (d /
        heads values each).
      context: Longest sequence.
      vocabulary: Rows of the embedding table, at least 256.
      attention: Argument of `models.nets.attention.causal_attention`: "products"
        repeats bit for bit everywhere, flash attention is faster.

    Raises:
      ValueError: a size is below 1, heads do not divide the width, the vocabulary is
        below 256, or the attention is unknown.
    """

    layers: int
    width: int
    heads: int
    context: int
    vocabulary: int = BYTES
    attention: Attention = "products"

    def __post_init__(self) -> None:
        if min(self.layers, self.width, self.heads, self.context) < 1:
            raise ValueError(f"{self} has a size below 1; every size must be positive")
        _check_heads(self.heads, self.width, "choose a divisor")
        _check_vocabulary(self.vocabulary)
        check_choice("attention", self.attention, get_args(Attention))

    @property
    def head_size(self) -> int:
        """Values of one head of attention."""
        return self.width // self.heads

    @property
    def columns(self) -> int:
        """Columns of all matrices of a block, with `width` rows or transposed."""
        return 12 * self.width


@dataclass(frozen=True)
class LlamaConfig:
    """Size of a `Llama`, and how it runs. The defaults of everything below `rope_theta`
    are those of Llama 2.

    Attributes:
      layers, width, heads: Number of blocks, model dimension d, query heads.
      kv_heads: Heads of keys and values; each serves heads / kv_heads query heads.
      hidden: Values between the matrices of a SwiGLU.
      context: Longest sequence, and rows of the table of rotations.
      vocabulary: Rows of the embedding table, at least 256.
      head: "tied" multiplies by the embedding table; "untied" has a matrix of its own.
      rope_theta: Base of the wavelengths of rotary positions.
      norm_eps: Constant added to mean squares.
      attention: Argument of `models.nets.attention.causal_attention`; "auto" is flash
        attention if the device has it.
      remat: Values that a block keeps for its backward pass. "none" recomputes nothing.
        "products" recomputes everything except products and attention. "block" keeps
        only the block's input, and of the loss only the head's input. "auto" is a
        request: `models.train` and the benchmarks keep as much as fits, and the model
        alone is "block". Names joined by "+" keep these values, such as
        "attended+gate_fp8": those of `KEPT_NAMES`, gate_fp8 and up_fp8 for copies in
        FP8, and "tcfp_activation" for inputs that products quantized.
      loop: "scan" compiles one block. "unrolled" compiles all, which takes two to three
        times as long, for steps that copy no kept value into a stack and out of it.
        Parameters are the same.
      head_dim: Values of a head; None is width / heads.
      rope_factor: Factor by which wavelengths are longer.
      rope_original: Context before Llama 3.1 made it longer. Wavelengths above
        `rope_original / rope_low` are `rope_factor` times as long, those below
        `rope_original / rope_high` stay, and in between both are mixed. None stretches
        all.
      rope_low, rope_high: See `rope_original`.
      bias: "qkv" adds a bias to queries, keys and values, as Qwen2 does.
      qk_norm: RMSNorms of queries and keys before their rotation: "heads" normalizes
        each head by one scale for all of them (Qwen3, Gemma 3), "all" normalizes all
        heads together (OLMoE).
      post_norms: "on" has a norm of the result of attention and of the MLP, too (Gemma
        2 and 3).
      activation: Of gates: "silu", or "gelu" by tanh (Gemma).
      embedding_scale: Factor of embeddings; the square root of the width in Gemma.
      attention_scale: Factor of the scores of attention; None is `head_size ** -0.5`.
      attention_cap, logit_cap: Largest magnitude of scores and of logits, by tanh
        (Gemma 2); None has none.
      window: Number of positions that a layer sees, itself included, if it is not every
        `global_every`-th; None sees all.
      global_every: Distance of layers that see all positions, among those with a
        window.
      lora: Rank of the adapters next to the matrices of layers
        (`models.nets.adapters`); 0 has none.
      norm_offset: Number that Transformers adds to the scale of a norm, 1 in Gemma. The
        scales here include it.
      local_theta: `rope_theta` of layers with a window, unstretched (Gemma 3); None
        rotates them like all others.

    Raises:
      ValueError: a size is below 1, the vocabulary is below 256, or a factor is not
        positive. Heads do not divide the width or have an odd size, or kv_heads do not
        divide heads. A choice is unknown.
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
    rope_factor: float = 1.0
    rope_original: int | None = None
    rope_low: float = 1.0
    rope_high: float = 4.0
    bias: Bias = "none"
    qk_norm: QKNorm = "none"
    post_norms: Switch = "off"
    activation: Nonlinearity = "silu"
    embedding_scale: float = 1.0
    attention_scale: float | None = None
    attention_cap: float | None = None
    logit_cap: float | None = None
    window: int | None = None
    global_every: int = 2
    local_theta: float | None = None
    norm_offset: float = 0.0
    lora: int = 0

    def __post_init__(self) -> None:
        sizes = [
            self.layers,
            self.width,
            self.heads,
            self.kv_heads,
            self.hidden,
            self.context,
            self.global_every,
            self.head_dim,
            self.window,
            self.rope_original,
        ]
        if min(size for size in sizes if size is not None) < 1:
            raise ValueError(f"{self} has a size below 1; every size must be positive")
        if self.lora < 0:
            raise ValueError(
                f"lora={self.lora} must be a rank of at least 1, or 0 for no adapters"
            )
        if self.head_dim is None:
            _check_heads(self.heads, self.width, "choose a divisor, or head_dim")
        if self.head_size % 2:
            raise ValueError(
                f"heads={self.heads} of width={self.width} have {self.head_size} values"
                " each, but rotary positions turn pairs; choose heads of an even size"
            )
        if self.heads % self.kv_heads:
            raise ValueError(
                f"kv_heads={self.kv_heads} does not divide heads={self.heads}; choose a"
                " divisor"
            )
        _check_vocabulary(self.vocabulary)
        for name in _FACTORS:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name}={value} must be positive")
        if self.rope_original is not None and not self.rope_high > self.rope_low:
            raise ValueError(
                f"rope_high={self.rope_high} must exceed rope_low={self.rope_low};"
                " exchange them"
            )
        for name, words in _CHOICES.items():
            check_choice(name, getattr(self, name), get_args(words))
        check_remat(self.remat)

    @property
    def head_size(self) -> int:
        """Values of one head of attention."""
        return self.width // self.heads if self.head_dim is None else self.head_dim

    @property
    def columns(self) -> int:
        """Columns of all matrices of a block that a token multiplies, with `width` rows
        or transposed.
        """
        return (2 * self.heads + 2 * self.kv_heads) * self.head_size + 3 * self.hidden


@dataclass(frozen=True)
class MoeConfig(LlamaConfig):
    """Size of a `Moe`, and how it runs: a Llama whose MLP has experts of `hidden`
    values each.

    Attributes:
      experts, chosen: Number of experts, and of those that a token goes through.
      shared: Hidden values of a SwiGLU for all tokens; 0 is none.
      normalized: Weights of the chosen experts: "all" takes the softmax over all
        experts (OLMoE), "chosen" divides the chosen ones by their sum (Qwen3).
      balance, z_loss: Factors of the penalties, whose mean over the layers counts.

    Raises:
      ValueError: as `LlamaConfig`; there are fewer experts than chosen ones, or a
        factor is negative.
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
            raise ValueError(
                f"chosen={self.chosen} of experts={self.experts}; choose 1 to"
                f" {self.experts} of them"
            )
        for name in ("shared", "balance", "z_loss"):
            if not getattr(self, name) >= 0:
                raise ValueError(
                    f"{name}={getattr(self, name)} must be zero or positive"
                )
        check_choice("normalized", self.normalized, get_args(Normalized))

    @property
    def columns(self) -> int:
        """As in `LlamaConfig`: those of the router, and of the experts that a token
        goes through.
        """
        return (
            super().columns
            + 3 * ((self.chosen - 1) * self.hidden + self.shared)
            + self.experts
        )


ModelConfig = GPTConfig | LlamaConfig


def _check_heads(heads: int, width: int, repair: str) -> None:
    if width % heads:
        raise ValueError(f"heads={heads} does not divide width={width}; {repair}")


def _check_vocabulary(vocabulary: int) -> None:
    if vocabulary < BYTES:
        raise ValueError(
            f"vocabulary={vocabulary} is below the {BYTES} byte values; raise it"
        )


def check_remat(remat: str) -> None:
    """Raise `ValueError` if `LlamaConfig.remat` knows no such value."""
    known = {*KEPT_NAMES, *"+".join(_ORDER["fp8"]).split("+")}
    if remat != "none" and kept_names(remat) - known:
        raise ValueError(
            f"remat={remat!r} is unknown; use 'none', 'block', 'products', 'auto', or"
            f" some of {sorted(known)} joined by '+'"
        )


def kept_names(remat: str) -> set[str]:
    """Return the names of the values that a block keeps; "none" keeps all values, with
    and without a name.

    >>> sorted(kept_names("gate_fp8+attended")), kept_names("block")
    (['attended', 'gate_fp8'], set())
    """
    return {"block": set(), "auto": set(), "products": set(KEPT_NAMES)}.get(
        remat, set(remat.split("+"))
    )


def kept_of_head(remat: str) -> Literal["inputs", "logits"]:
    """Return the values that the loss keeps: the logits if every product is kept."""
    return (
        "logits"
        if remat == "none" or kept_names(remat).issuperset(KEPT_NAMES)
        else "inputs"
    )


def remat_levels(copies: Copies) -> list[str]:
    """Return values of `LlamaConfig.remat` for "auto", in the order of the bytes that
    they keep.

    Args:
      copies: "exact" keeps equal values, so that all levels have the same gradients.
        "fp8" keeps gate and up in FP8, and the inputs that products quantized.

    >>> remat_levels("fp8")[:3]
    ['block', 'attended', 'attended+gate_fp8']
    """
    return ["block", *accumulate(_ORDER[copies], "{}+{}".format)]
