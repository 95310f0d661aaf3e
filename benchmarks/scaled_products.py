"""Time of products whose operands have a scale for each row or block instead of one for
the tensor.

    python -m benchmarks.scaled_products --json

`python -m benchmarks.gemm` runs it, too, and checks and times products in the same way.
"block 128 dual" has a scale for every vector of 128 values of x and every square of 128
x 128 of W = hi + lo. "mx" is OCP MX, with vectors of 32 on both sides. "row" has a
scale for every row of x and of W.
"""

import argparse
import dataclasses
from collections.abc import Iterator
from typing import Literal

from benchmarks import common, gemm, products
from benchmarks.common import Result
from benchmarks.gemm import Config, Row
from benchmarks.products import Form, Product
from benchmarks.shapes import H200_SHAPES, MIDDLE, GemmShape, random_operands
from pallas_kernels.operands import BLOCK_SIZES, Block
from pallas_kernels.operands import Row as RowScaling

__all__ = ["NAME", "Config", "Row", "add_options", "configure", "measure", "table"]

NAME = "scaled_products"
_NAMES: dict[Literal[1, 2], str] = {1: "single", 2: "dual"}
FORMS = {
    f"block {b} {name}": Form(n, scaling=Block(b))
    for b in BLOCK_SIZES[::-1]
    for n, name in _NAMES.items()
} | {
    "mx single": Form(1, scaling=Block(32, "vector")),
    "row single": Form(1, "fast", RowScaling()),
}
add_options = gemm.add_shape_options


def configure(options: argparse.Namespace) -> Config:
    """Return the settings of `benchmarks.gemm`; on a GPU only its middle shape."""
    config = gemm.configure(options)
    return (
        dataclasses.replace(config, shapes=(MIDDLE,))
        if config.shapes is H200_SHAPES
        else config
    )


def measure(config: Config) -> Iterator[Row]:
    """Check and time every product at every shape."""
    return gemm.measure_products(config, _find_products)


def _find_products(shape: GemmShape, config: Config) -> list[Product]:
    x, w = random_operands(shape, config.seed)
    found = [products.bf16_product(x, w)]
    for kind, form in FORMS.items():
        pair = form.quantize(x, w)
        for backend in config.backends:
            found += products.possible(
                [products.fp8_product(kind, form, pair, backend)]
            )
    return found


def table(result: Result) -> str:
    """Return the page's table of the products that `FORMS` has."""
    rows = [row for row in result.rows if row["kind"] in ("bf16", *FORMS)]
    return gemm.table(dataclasses.replace(result, rows=rows))


if __name__ == "__main__":
    common.command(NAME)
