"""The ways to end a run that `benchmarks.finish` compares."""

from dataclasses import dataclass, replace

from benchmarks.variants import BASELINE, RECOMMENDED, RERUN, VARIANTS, Variant
from models.training.finish import BF16, BF16_FORWARD, Finish
from models.training.settings import Included

FP4 = "nvfp4_training"


@dataclass(frozen=True)
class Ending:
    """The last part of a run.

    Attributes:
      base: The variant that trains the first part.
      meaning: Description in words.
      percent: Size of the last part.
      products: Its products, as in `models.training.finish.Finish`; None goes on as the
        base.
      include: "bf16_head" multiplies a stored head in BF16.
      stored_as: The variant that stores the weights of a float base from here on.
    """

    base: str
    meaning: str
    percent: int = 10
    products: str | None = None
    include: Included = "every"
    stored_as: str | None = None

    @property
    def is_as_begun(self) -> bool:
        """True if the run ends as it began."""
        return self == replace(self, products=None, include="every", stored_as=None)

    @property
    def variant(self) -> Variant:
        """The way to train the last part."""
        if self.stored_as is not None:
            return VARIANTS[self.stored_as]
        base = VARIANTS[self.base]
        products = None
        if self.products is not None:
            finish = Finish(self.products, self.percent / 100)
            products = finish.recipe(base.recipe, base.weights == "stored")
        return replace(base, products=products, include=self.include)


def _stored(meaning: str, products: str | None = None, **own: Included) -> Ending:
    return Ending(RECOMMENDED, f"stored weights, {meaning}", 10, products, **own)


def _fp4(meaning: str, products: str | None = None, percent: int = 10) -> Ending:
    return Ending(FP4, f"NVFP4 training, {meaning}", percent, products)


ENDINGS = {
    "bf16": Ending(BASELINE, "BF16, as begun"),
    "bf16_rerun": Ending(RERUN, VARIANTS[RERUN].meaning),
    "bf16_stored": Ending(BASELINE, "BF16, then stored weights", stored_as=RECOMMENDED),
    "stored": _stored("as begun"),
    "stored_hi_lo": _stored("forward by hi + lo", "tcfp12_fast"),
    "stored_bf16_forward": _stored("BF16 forward", BF16_FORWARD),
    "stored_bf16": _stored("BF16 forward and backward", BF16),
    "stored_bf16_head": _stored("head in BF16", include="bf16_head"),
    "nvfp4": _fp4("as begun"),
    "nvfp4_bf16_forward": _fp4("BF16 forward", BF16_FORWARD),
    "nvfp4_bf16_forward_5": _fp4("BF16 forward", BF16_FORWARD, 5),
    "nvfp4_bf16_forward_20": _fp4("BF16 forward", BF16_FORWARD, 20),
    "nvfp4_bf16_forward_40": _fp4("BF16 forward", BF16_FORWARD, 40),
    "nvfp4_bf16_forward_80": _fp4("BF16 forward", BF16_FORWARD, 80),
    "nvfp4_bf16": _fp4("BF16 forward and backward", BF16),
    "nvfp4_tensorwise": _fp4("`tensorwise`", "tensorwise"),
    "nvfp4_tensorwise_40": _fp4("`tensorwise`", "tensorwise", 40),
}


def as_begun(base: str) -> str:
    """Return the name of the ending that goes on as its base.

    >>> as_begun("bf16")
    'bf16'
    """
    for name, ending in ENDINGS.items():
        if ending.base == base and ending.is_as_begun:
            return name
    raise ValueError(f"no ending goes on as {base!r}")
