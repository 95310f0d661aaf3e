"""List the catalog, or show one datatype.

    python -m tcfp_jax.formats
        every datatype: bits, range, eps, SNR on N(0, 1)
    python -m tcfp_jax.formats mxfp4e2
        one, with its number line
    python -m tcfp_jax.formats --table
        the best known as a Markdown table, for docs/formats.md

A name outside the catalog is read as the code of a number, such as e3m4, or of a number
and a scale, such as e2m1f_e8m0_t16. SNR is the signal-to-noise ratio of a cast of 128 x
1024 normal values, and bits are counted per value, scales and all. The list takes about
a minute, because each cast is compiled.
"""

import argparse
import math
import os
import sys
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from tcfp_jax.formats.casting import cast
from tcfp_jax.formats.catalog import CATALOG, named
from tcfp_jax.formats.datatypes import DataType

_SHAPE = (128, 1024)
TABLE: tuple[str, ...] = (  # the rows of docs/formats.md, by bits per value
    "mx4",
    "mxint4",
    "mxfp4e2",
    "nvfp4",
    "nf4",
    "icb44fi4_e32s8",
    "mx6",
    "mxfp6e3",
    "mxfp6e2",
    "e4m3fn",
    "mxfp8e5",
    "mxfp8e4",
    "mxint8",
    "mx9",
    "tcfp12",
)
_LINE = "{:<18} {:<40} {:>8} {:>11} {:>11} {:>10} {:>8}"


def _snr_db(made: DataType) -> float:
    """Return 10 log10(sum x^2 / sum (x - cast(x))^2) of 128 x 1024 normal values.

    It is inf if nothing is lost.
    """
    x = jax.random.normal(jax.random.key(0), _SHAPE)
    exact = np.asarray(x, np.float64)
    lost = exact - np.asarray(cast(x, made), np.float64)
    noise = float(np.sum(lost**2))
    return math.inf if noise == 0 else 10 * math.log10(float(np.sum(exact**2)) / noise)


def _describe(made: DataType) -> str:
    """Return one row of the list."""
    number = made.number
    return _LINE.format(
        made.name,
        _content(made),
        f"{made.bits_per_value(_SHAPE):.4g}",
        f"{number.min:.5g}",
        f"{number.max:.5g}",
        f"{number.eps:.3g}",
        f"{_snr_db(made):.2f}",
    )


def _table() -> Iterator[str]:
    """Yield the lines of a Markdown table of the datatypes of `TABLE`."""
    yield "| datatype | content | bits per value | SNR on N(0, 1), dB |"
    yield "|---|---|--:|--:|"
    for name in TABLE:
        made = CATALOG[name]
        yield (
            f"| `{name}` | {_content(made)} | {made.bits_per_value():.4g} |"
            f" {_snr_db(made):.1f} |"
        )


def _content(made: DataType) -> str:
    code = f"{made.number.name}_{made.scale.name}" if made.scale else made.number.name
    return code if made.residual is None else f"{code} + {_content(made.residual)}"


def _show(made: DataType) -> str:
    """Describe a datatype in words, with its number line if that is short."""
    number = made.number
    scale = made.scale.name if made.scale else "none"
    bits = f"{made.bits_per_value(_SHAPE):.6g}"
    lines = [
        f"{made.name}: number {number.name}, scale {scale}, in all {_content(made)}",
        f"bits per value {bits} ({_SHAPE[0]} x {_SHAPE[1]} values)",
        f"bits {number.bits}, min {number.min:.8g}, max {number.max:.8g}, eps"
        f" {number.eps:.8g}",
    ]
    for attribute in (
        "ebits",
        "mbits",
        "bias",
        "infnan",
        "emin",
        "emax",
        "midmax",
        "smallest_subnormal",
        "dtype",
    ):
        if hasattr(number, attribute):
            lines.append(f"{attribute} {getattr(number, attribute)}")
    lines.append(f"SNR on N(0, 1) {_snr_db(made):.2f} dB")
    if number.bits <= 8:
        values = number.number_line()
        lines.append(f"number line, {len(values)} values:")
        lines.append(" ".join(f"{value:.6g}" for value in values))
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit status, 2 for a name without a meaning."""
    parser = argparse.ArgumentParser(
        "python -m tcfp_jax.formats",
        description="List the catalog, or show a datatype.",
    )
    parser.add_argument(
        "name",
        nargs="?",
        help="a datatype of the catalog, or the code of a number, with a scale's",
    )
    parser.add_argument(
        "--table", action="store_true", help="write the table of docs/formats.md"
    )
    options = parser.parse_args(arguments)
    if options.table:
        for line in _table():
            print(line, flush=True)
    elif options.name is not None:
        try:
            made = named(options.name)
        except ValueError as error:
            print(error, file=sys.stderr)
            return 2
        print(_show(made))
    else:
        print(_LINE.format("name", "content", "bits", "min", "max", "eps", "SNR, dB"))
        for made in CATALOG.values():
            print(_describe(made), flush=True)
    return 0


if __name__ == "__main__":
    try:
        status = main()
        sys.stdout.flush()
    # A reader such as `head` has enough, and Python would flush once more at its end
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 0
    sys.exit(status)
