"""Time of products whose operands have more scales than one, and of the three products of a residual activation.

    python -m benchmarks.scaled_products --json

`python -m benchmarks.gemm` runs it, too; products are checked and timed as there. "block 128 dual" has a scale for
every vector of 128 values of x and every square of 128 x 128 of W = hi + lo; "mx" is OCP MX's, vectors of 32 on both
sides; "row" has a scale for every row of x and of W; "x = hi + lo" splits the activation, too.
"""

import argparse
import dataclasses
import functools
from collections.abc import Iterator

from benchmarks import common, gemm, products
from benchmarks.gemm import Config, Row, show, table
from benchmarks.products import Form, Product
from benchmarks.shapes import H200_SHAPES, MIDDLE, GemmShape, random_operands
from pallas_kernels.blocks import BLOCKS
from tcfp_jax.recipes import recipe

__all__ = ["NAME", "Config", "Row", "add_options", "configure", "measure", "show", "table"]

NAME = "scaled_products"
FORMS = {
    f"block {b} {('single', 'dual')[halves - 1]}": Form(halves, block=b) for b in BLOCKS[::-1] for halves in (1, 2)
} | {"mx single": Form(1, block=32, tile="vector")}
# kind: (recipe, the FP8 products that its forward product is made of)
RECIPES = {"row single": ("rowwise", 1), "x = hi + lo, dual": ("residual_activation", 3)}
add_options = gemm.add_shape_options


def configure(options: argparse.Namespace) -> Config:
    """The settings of `benchmarks.gemm`; on a GPU its middle shape alone."""
    config = gemm.configure(options)
    return dataclasses.replace(config, shapes=(MIDDLE,)) if config.shapes is H200_SHAPES else config


def measure(config: Config) -> Iterator[Row]:
    """Check and time every product at every shape."""
    return gemm.measure_products(config, _find_products)


def _find_products(shape: GemmShape, config: Config) -> list[Product]:
    x, w = random_operands(shape, config.seed)
    found = [products.bf16_product(x, w)]
    for kind, form in FORMS.items():
        arrays = form.quantize(x, w)
        for backend in config.backends:
            found += products.possible([products.fp8_product(kind, form, arrays, backend)])
    for kind, (name, gemms) in RECIPES.items():
        for backend in config.backends:
            chosen = recipe(name, backend=backend, quantize_backend="xla", wgrad="bf16", forward_accumulation="fast")
            found += products.possible([products.recipe_product(kind, x, w, chosen, gemms, backend)])
    return found


main = functools.partial(common.main, NAME)

if __name__ == "__main__":
    common.command(NAME)
