"""The end of a run with other products: two compiled steps over one state.

    --finish bf16:0.1      the last tenth of the steps multiplies in BF16

Parameters, moments and their random bits stay those of the run's recipe, so no state is
new, and a checkpoint before the switch serves both steps. Stored weights are read as
they are. Float weights are quantized anew at each step, if the state has no quantized
ones of this form.
"""

import math
from dataclasses import dataclass, replace

from tcfp_jax.recipes import NAMES, Dual, Recipe, describe
from tcfp_jax.recipes import recipe as named_recipe

from ..nets.families import exact

BF16 = "bf16"
BF16_FORWARD = "bf16_forward"


@dataclass(frozen=True)
class Finish:
    """How a run ends.

    Attributes:
      products: "bf16" for all three products, "bf16_forward" for the forward product
        (and the weight gradient, if weights are stored), or the name of a recipe.
      fraction: Part of the steps, above 0 and below 1.

    Raises:
      ValueError: the name is unknown, or the fraction is out of range.
    """

    products: str
    fraction: float

    def __post_init__(self) -> None:
        known = (BF16_FORWARD, *NAMES)
        if self.products not in known:
            raise ValueError(
                f"finish={self}: {self.products!r} is unknown; use one of {list(known)}"
            )
        if not 0 < self.fraction < 1:
            raise ValueError(
                f"finish={self}: the switch is never reached, or at the first step; use"
                " a fraction above 0 and below 1, such as 0.1 for the last tenth"
            )

    def __str__(self) -> str:
        return f"{self.products}:{self.fraction:g}"

    @classmethod
    def parse(cls, text: str) -> "Finish":
        """Return the finish in "PRODUCTS:FRACTION".

        Raises:
          ValueError: the text has another form, or as `Finish`.

        >>> Finish.parse("bf16:0.1")
        Finish(products='bf16', fraction=0.1)
        """
        products, _, fraction = text.partition(":")
        try:
            part = float(fraction)
        except ValueError:
            part = math.nan
        if math.isnan(part):
            raise ValueError(
                f"finish={text!r} is not PRODUCTS:FRACTION, such as bf16:0.1"
            ) from None
        return cls(products, part)

    def switch(self, steps: int, steps_per_call: int) -> int:
        """Return the number of steps before the switch, a multiple of `steps_per_call`.

        Raises:
          ValueError: no step is left before it or after it.

        >>> Finish("bf16", 0.1).switch(400, 10)
        360
        """
        found = round(steps * (1 - self.fraction) / steps_per_call) * steps_per_call
        if not 0 < found < steps:
            raise ValueError(
                f"finish={self} of steps={steps}: the switch, at a multiple of"
                f" steps_per_call={steps_per_call}, is at step {found}, so one part"
                " has no steps; change the fraction, or lower steps_per_call"
            )
        return found

    def recipe(self, kept: Recipe, is_stored: bool) -> Recipe:
        """Return the recipe of the last products.

        Args:
          kept: The recipe of the run, whose state the optimizer keeps.
          is_stored: Whether weights are stored; otherwise they are floats.

        Raises:
          ValueError: the optimizer keeps no state that these products read, or the run
            has these products from its first step on.
        """
        found = self._of_stored(kept) if is_stored else self._of_floats(kept)
        if found == kept:
            raise ValueError(
                f"finish={self} of a run with recipe {describe(kept)!r}: the run"
                " multiplies so from its first step on, and would not change; name"
                " other products, or leave finish"
            )
        return found

    def _of_stored(self, kept: Recipe) -> Recipe:
        if self.products == BF16:
            return exact(kept)
        if self.products == BF16_FORWARD:
            in_bf16 = exact(kept)
            dgrad = kept.weight.dgrad if isinstance(kept.weight, Dual) else "hi"
            return named_recipe(in_bf16, dgrad=kept.dgrad, dgrad_weight=dgrad)
        wanted = named_recipe(self.products)
        form = wanted.weight
        if not isinstance(form, Dual) or wanted.scaling != kept.scaling:
            raise ValueError(
                f"finish={self} of weights stored by {describe(kept)!r}: it reads"
                f" weight={form} with scaling={wanted.scaling}, but the optimizer keeps"
                f" weight={kept.weight} with scaling={kept.scaling} and no floats; use"
                f" {BF16!r} or {BF16_FORWARD!r}, which read all stored weights"
            )
        assert isinstance(kept.weight, Dual), "stored weights have two halves"
        form = replace(form, remainder=kept.weight.remainder)
        return replace(wanted, weight=form, copies=kept.copies)

    def _of_floats(self, kept: Recipe) -> Recipe:
        if self.products == BF16_FORWARD:
            if kept.fp4 is None:
                raise ValueError(
                    f"finish={self} of float weights with recipe {describe(kept)!r}:"
                    " the forward product alone is BF16 in FP4 training, or if weights"
                    f" are stored; use {BF16!r}"
                )
            return named_recipe(kept, forward_operands="bf16")
        wanted = named_recipe(self.products)
        if wanted.feedback and not same_form(kept, wanted):
            raise ValueError(
                f"finish={self} of float weights with recipe {describe(kept)!r}:"
                f" {self.products!r} keeps the error of weight={wanted.weight} with"
                f" scaling={wanted.scaling}, but the optimizer keeps"
                f" weight={kept.weight} with scaling={kept.scaling}; use {BF16!r},"
                " 'tensorwise' or 'rowwise'"
            )
        return wanted


def same_form(kept: Recipe, products: Recipe) -> bool:
    """Return whether products read the quantized weights of another recipe's state.

    >>> same_form(named_recipe("tcfp12"), named_recipe("tcfp12_fast"))
    True
    """
    if kept.stored is None or products.stored is None:
        return False
    facts = [
        (
            type(one.stored),
            one.stored.dtype,
            one.stored.remainder,
            one.scaling,
            one.amax,
        )
        for one in (kept, products)
        if one.stored is not None
    ]
    return facts[0] == facts[1]
