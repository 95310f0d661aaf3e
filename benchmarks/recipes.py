"""Recipes with other scales than one a tensor beside the main ones, in one run: a training step of an MLP.

    python -m benchmarks.recipes --json

What is measured and checked is the part "mlp" of `benchmarks.train_step`; the ratio is BF16's median over the recipe's.
"""

import sys

import jax

from benchmarks import common, train_step
from benchmarks.shapes import MIDDLE, GemmShape

NAME = "recipes"
RECIPES = ("bf16", "tensorwise", "tcfp12", "tcfp12_fast", *train_step.COMPARED)


def main(arguments: list[str] | None = None) -> list[train_step.Row]:
    """Run the command and return its rows."""
    parser = common.make_parser(NAME, __doc__)
    parser.add_argument("--shape", help="TOKENSxDxD_FF (default: 8192x4096x16384 on a GPU)")
    options = parser.parse_args(arguments)
    shape = MIDDLE if jax.default_backend() == "gpu" else train_step.CPU_SHAPES[0]
    if text := options.shape or (train_step.SMOKE_SHAPE if options.smoke else None):
        shape = GemmShape.parse(text)
    config = train_step.Config((shape,), (), RECIPES, ("mlp",), rounds=2 if options.smoke else 5)
    header, path = common.make_header(), common.result_path(NAME, options)
    common.print_header(NAME, header)
    rows = train_step.measure(config)
    train_step.show(rows)
    common.write_result(path, NAME, header, config, rows)
    common.announce(path)
    return rows


if __name__ == "__main__":
    main(sys.argv[1:])
