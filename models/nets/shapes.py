"""Shapes of `models.nets.llama.Llama`: sizes, and the options by which Llama, Qwen and Gemma
differ.

Sources: Grattafiori et al. 2024, "The Llama 3 Herd of Models"; Yang et al. 2025, "Qwen3
Technical Report"; Gemma Team 2024, "Gemma 2"; 2025, "Gemma 3 Technical Report".
"""

from dataclasses import dataclass
from typing import Literal, get_args

from models import BYTES
from models.nets.attention import Attention
from models.nets.keeping import check_remat

Head = Literal["tied", "untied"]
Loop = Literal["scan", "unrolled"]
Activation = Literal["silu", "gelu"]
Bias = Literal["none", "qkv"]
QKNorm = Literal["none", "heads", "all"]
Switch = Literal["off", "on"]


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
      lora: Rank of the adapters next to the matrices of layers (`models.nets.adapters`); 0
        has none.
      norm_offset: Number that Transformers adds to the scale of a norm, 1 in Gemma. The
        scales here include it.
      local_theta: `rope_theta` of layers with a window, unstretched (Gemma 3); None
        rotates them like all others.

    Raises:
      ValueError: a size is below 1, heads do not divide the width or have an odd size,
        kv_heads do not divide heads, the vocabulary is below 256, a factor is not
        positive, or a choice is unknown.
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
    activation: Activation = "silu"
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
        sizes = (
            self.layers,
            self.width,
            self.heads,
            self.kv_heads,
            self.hidden,
            self.context,
            self.global_every,
        )
        if (
            min(
                *sizes,
                *(
                    n
                    for n in (self.head_dim, self.window, self.rope_original)
                    if n is not None
                ),
            )
            < 1
        ):
            raise ValueError(f"{self} has a size below 1; every size must be positive")
        if self.lora < 0:
            raise ValueError(
                f"lora={self.lora} must be a rank of at least 1, or 0 for no adapters"
            )
        if self.head_dim is None and self.width % self.heads:
            raise ValueError(
                f"heads={self.heads} does not divide width={self.width}; choose a"
                " divisor, or head_dim"
            )
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
        if self.vocabulary < BYTES:
            raise ValueError(
                f"vocabulary={self.vocabulary} is below the {BYTES} byte values;"
                " raise it"
            )
        for name in (
            "rope_theta",
            "norm_eps",
            "rope_factor",
            "rope_low",
            "embedding_scale",
            "attention_scale",
            "attention_cap",
            "logit_cap",
            "local_theta",
        ):
            if (value := getattr(self, name)) is not None and not value > 0:
                raise ValueError(f"{name}={value} must be positive")
        if self.rope_original is not None and not self.rope_high > self.rope_low:
            raise ValueError(
                f"rope_high={self.rope_high} must exceed rope_low={self.rope_low};"
                " exchange them"
            )
        choices = dict(
            head=Head,
            attention=Attention,
            loop=Loop,
            bias=Bias,
            qk_norm=QKNorm,
            post_norms=Switch,
        )
        for name, allowed in dict(**choices, activation=Activation).items():
            if getattr(self, name) not in get_args(allowed):
                raise ValueError(
                    f"{name}={getattr(self, name)!r} is unknown; use one of"
                    f" {list(get_args(allowed))}"
                )
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


LLAMAS = {
    "llama-tiny": LlamaConfig(
        layers=2, width=128, heads=4, kv_heads=2, hidden=384, context=128
    ),
    "llama-124m": LlamaConfig(
        layers=12,
        width=768,
        heads=12,
        kv_heads=12,
        hidden=2048,
        context=1024,
        vocabulary=50304,
    ),
    "llama-1b": LlamaConfig(
        layers=16,
        width=2048,
        heads=32,
        kv_heads=8,
        hidden=8192,
        context=8192,
        vocabulary=128_256,
        rope_theta=500_000.0,
        remat="auto",
    ),
    "llama-8b": LlamaConfig(
        layers=32,
        width=4096,
        heads=32,
        kv_heads=8,
        hidden=14_336,
        context=8192,
        vocabulary=128_256,
        head="untied",
        rope_theta=500_000.0,
        remat="auto",
    ),
}
