"""The forms of weights that train: float, stored, or adapters next to frozen ones."""

from dataclasses import dataclass
from typing import Literal, get_args

from pallas_kernels.checks import check_choice

ErrorDtype = Literal["float32", "bfloat16", "float8_e5m2"]
Weights = Literal["float", "stored"]
MomentFormat = Literal["8bit", "bfloat16", "float32"]
Update = Literal["auto", "behind", "backward"]


@dataclass(frozen=True)
class Float:
    """Float32 parameters next to the quantized weights of the recipe.

    Attributes:
      error_dtype: Dtype of the error-feedback buffers.

    Raises:
      ValueError: the dtype is unknown.
    """

    error_dtype: ErrorDtype = "float32"

    def __post_init__(self) -> None:
        check_choice("error_dtype", self.error_dtype, get_args(ErrorDtype))


@dataclass(frozen=True)
class Stored:
    """`W_hi + W_lo` as the only copy of each kernel, rounded stochastically
    (`tcfp_jax.store`).

    Attributes:
      moments: Format of AdamW's moments.
      update: When layers are updated: "behind" the backward pass, or inside it
        ("backward", `tcfp_jax.train_step`), so that the gradients of one matrix exist
        at a time. Each matrix is then clipped to its part of the limit.
        "auto" is "behind" if its step fits the device, and is decided before the first
        step of a run (`models.training.deciding`).

    Raises:
      ValueError: a name is unknown.
    """

    moments: MomentFormat = "8bit"
    update: Update = "behind"

    def __post_init__(self) -> None:
        check_choice("moments", self.moments, get_args(MomentFormat))
        check_choice("update", self.update, get_args(Update))


@dataclass(frozen=True)
class Adapters:
    """Adapters, which train alone next to weights that are quantized once by the recipe
    (`models.nets.adapters`).

    Attributes:
      rank: Their rank.
    """

    rank: int


Trained = Float | Stored | Adapters


def trained_form(
    weights: Weights = "float",
    moments: MomentFormat = "float32",
    error_dtype: ErrorDtype = "float32",
    lora: int = 0,
    update: Update = "behind",
) -> Trained:
    """Return the form of the weights that settings of the command line name.

    Raises:
      ValueError: a setting is for another form.

    >>> trained_form("stored", "bfloat16")
    Stored(moments='bfloat16', update='behind')
    """
    check_choice("weights", weights, get_args(Weights))
    if lora and weights == "stored":
        raise ValueError(
            f"lora={lora} with weights={weights!r}: frozen weights are quantized once"
            " and do not train; leave one of them out"
        )
    if lora:
        _check_alone(lora, moments=moments, error_dtype=error_dtype, update=update)
    if weights == "float" and moments != "float32":
        raise ValueError(
            f"moments={moments!r} with weights='float': narrow moments are those of the"
            " optimizer of stored weights; use weights='stored' or moments='float32'"
        )
    if weights == "stored" and error_dtype != "float32":
        raise ValueError(
            f"error_dtype={error_dtype!r} with weights='stored': they are rounded"
            " stochastically and have no error buffers; leave error_dtype, or use"
            " weights='float'"
        )
    if weights != "stored" and update != "behind":
        raise ValueError(
            f"update={update!r} with weights={weights!r}: layers are updated inside the"
            " backward pass if they are stored; use weights='stored', or leave update"
        )
    if lora:
        return Adapters(lora)
    return Stored(moments, update) if weights == "stored" else Float(error_dtype)


def _check_alone(lora: int, **settings: str) -> None:
    """Raise `ValueError` if a setting of weights that train is given for adapters."""
    for name, value in settings.items():
        if value not in ("float32", "behind"):
            raise ValueError(
                f"{name}={value!r} with lora={lora}: frozen weights do not train, and"
                " adapters are float32; leave one of them out"
            )
