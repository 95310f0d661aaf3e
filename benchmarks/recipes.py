"""Every recipe beside BF16 in one run: an MLP's forward and backward pass, and its optimizer step.

    python -m benchmarks.recipes --json

The parts "mlp" and "optimizer step" of `benchmarks.train_step` are measured and checked as there, at one shape; the
ratio is BF16's median over the recipe's.
"""

import argparse
import functools

import jax

from benchmarks import common, train_step
from benchmarks.common import Result, markdown_table, times
from benchmarks.shapes import MIDDLE, parse_shapes
from benchmarks.train_step import Config, Row, measure, show

__all__ = ["NAME", "Config", "Row", "add_options", "configure", "measure", "show", "table"]

NAME = "recipes"
# A recipe that is compared as `tcfp_jax.store` holds it, without float weights, and its name in `train_step`.
STORED, STORED_ROW, STORED_RUN = "tcfp12_single", "stored bfloat16", "train_step-stored"
RECIPES = ("bf16", STORED_ROW, "tensorwise", "tcfp12", "tcfp12_fast", *train_step.COMPARED)
PARTS: tuple[train_step.Part, ...] = ("mlp", train_step.OPTIMIZER)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The shape."""
    parser.add_argument("--shape", help="TOKENSxDxD_FF (default: 8192x4096x16384 on a GPU)")


def configure(options: argparse.Namespace) -> Config:
    """The settings of a command line."""
    default = MIDDLE if jax.default_backend() == "gpu" else train_step.CPU_SHAPES[0]
    shapes = parse_shapes(options.shape or (train_step.SMOKE_SHAPE if options.smoke else None)) or (default,)
    return Config(shapes, shapes, RECIPES, PARTS, rounds=2 if options.smoke else 5, peaks=0)


def table(result: Result) -> str:
    """A line a recipe, two columns a part."""
    rows, parts = result.by("part", "recipe"), result.distinct("part")
    titles = [f"MLP, {times(result.rows[0]['shape'])}"]
    for part in parts:
        titles += [{"mlp": "forward + backward"}.get(part, part), "speed over BF16"]
    lines = []
    for name in result.distinct("recipe"):
        # A run that was cut short lacks some; the JSON is written after every row.
        found = [rows.get((part, name)) for part in parts]
        cells = [
            cell
            for row in found
            for cell in (
                ("–", "–") if row is None else (f"{row['median_ms']:.3f} ms", f"**{row['speed_over_bf16']:.2f}**")
            )
        ]
        snr_db = None if found[0] is None else found[0]["worst_snr_db"]
        shown = STORED if name == STORED_ROW else name
        lines.append([f"`{shown}`", *cells, "–" if snr_db is None else f"{snr_db:.1f}"])
    return (
        f"{markdown_table([*titles, 'dB'], lines)}\n\n"
        f"In one run ({result.rows[0]['timer']}). The last column is the worst signal-to-noise ratio of output and "
        "gradients against BF16's."
    )


main = functools.partial(common.main, NAME)

if __name__ == "__main__":
    common.command(NAME)
