"""List the catalog, or show one datatype.

    python -m tcfp_jax.formats                     every datatype: bits, range, eps, SNR on N(0, 1)
    python -m tcfp_jax.formats mxfp4e2             one, with its number line
    python -m tcfp_jax.formats --table             the best known as a Markdown table, for docs/formats.md
    python -m tcfp_jax.formats --plot PATH         a plot of SNR against bits (needs matplotlib)

A name outside the catalog is read as the code of an unscaled number, such as e3m4. SNR is the signal-to-noise ratio of
a cast of 128 x 1024 normal values, and bits are counted per value, scales and all.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from tcfp_jax.formats.casting import cast
from tcfp_jax.formats.catalog import CATALOG
from tcfp_jax.formats.datatypes import DataType, datatype

_SHAPE = (128, 1024)
TABLE: tuple[str, ...] = (  # the rows of docs/formats.md, by bits per value
    "mx4", "mxint4", "mxfp4e2", "nvfp4", "nf4", "icb44fi4_e32s8", "mx6", "mxfp6e3", "mxfp6e2", "e4m3fn", "mxfp8e5",
    "mxfp8e4", "mxint8", "mx9", "tcfp12",
)  # fmt: skip
# The offset of a label from its point, in points, and the side of the label that is near the point. A thin line joins
# them, because most points lie so close together that a label next to one would cover another.
_LABELS: dict[str, tuple[int, int, str]] = {
    "mxfp4e2": (14, -24, "left"), "nvfp4": (36, -13, "left"), "nf4": (-16, 21, "right"), "mx6": (-8, 6, "right"),
    "mxfp6e2": (4, 13, "left"), "mxfp8e4": (20, -13, "left"), "mxint8": (12, -10, "left"), "mx9": (4, 11, "left"),
    "tcfp12": (7, 0, "left"), "bfloat16": (-7, 0, "right"), "float16": (-7, 0, "right"),
}  # fmt: skip
_LINE = "{:<18} {:<40} {:>8} {:>11} {:>11} {:>10} {:>8}"


def _snr_db(made: DataType) -> float:
    """Return 10 log10(sum x^2 / sum (x - cast(x))^2) for 128 x 1024 values from N(0, 1), or inf if nothing is lost."""
    x = jax.random.normal(jax.random.key(0), _SHAPE)
    exact, rounded = (np.asarray(v, np.float64) for v in (x, cast(x, made)))
    noise = float(np.sum((exact - rounded) ** 2))
    return math.inf if noise == 0 else 10 * math.log10(float(np.sum(exact**2)) / noise)


def _describe(made: DataType) -> str:
    """Return one row of the list."""
    number = made.number
    return _LINE.format(
        made.name, _content(made), f"{made.bits_per_value(_SHAPE):.4g}", f"{number.min:.5g}", f"{number.max:.5g}",
        f"{number.eps:.3g}", f"{_snr_db(made):.2f}",
    )  # fmt: skip


def _table() -> str:
    """Return the datatypes of `TABLE` as a Markdown table."""
    lines = ["| datatype | content | bits per value | SNR on N(0, 1), dB |", "|---|---|--:|--:|"]
    for name in TABLE:
        made = CATALOG[name]
        lines.append(f"| `{name}` | {_content(made)} | {made.bits_per_value():.4g} | {_snr_db(made):.1f} |")
    return "\n".join(lines)


def _content(made: DataType) -> str:
    code = f"{made.number.name}_{made.scale.name}" if made.scale else made.number.name
    return code if made.residual is None else f"{code} + {_content(made.residual)}"


def _show(made: DataType) -> str:
    """Describe a datatype in words, with its number line if that is short."""
    number, scale = made.number, made.scale
    lines = [f"{made.name}: number {number.name}, scale {scale.name if scale else 'none'}"]
    lines.append(f"bits per value {made.bits_per_value(_SHAPE):.6g} ({_SHAPE[0]} x {_SHAPE[1]} values)")
    lines.append(f"bits {number.bits}, min {number.min:.8g}, max {number.max:.8g}, eps {number.eps:.8g}")
    for attribute in ("ebits", "mbits", "bias", "infnan", "emin", "emax", "midmax", "smallest_subnormal", "dtype"):
        if hasattr(number, attribute):
            lines.append(f"{attribute} {getattr(number, attribute)}")
    lines.append(f"SNR on N(0, 1) {_snr_db(made):.2f} dB")
    if number.bits <= 8:
        values = number.number_line()
        lines += [f"number line, {len(values)} values:", " ".join(f"{value:.6g}" for value in values)]
    return "\n".join(lines)


def _plot(path: Path) -> None:
    """Write a PNG with the SNR on N(0, 1) against bits per value, for the whole catalog."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 6), dpi=120)
    groups: dict[str, list[tuple[float, float]]] = {}
    for name, made in CATALOG.items():
        bits, snr = made.bits_per_value(_SHAPE), _snr_db(made)
        if bits <= 17 and snr > 0:
            groups.setdefault(_group(made), []).append((bits, snr))
            if name in _LABELS:
                right, up, side = _LABELS[name]
                axes.annotate(
                    name, (bits, snr), xytext=(right, up), textcoords="offset points", fontsize=8, ha=side, va="center",
                    arrowprops={"arrowstyle": "-", "linewidth": 0.5, "color": "gray", "shrinkA": 0, "shrinkB": 2},
                )  # fmt: skip
    for group, points in groups.items():
        bits_of, snr_of = zip(*points, strict=True)
        axes.scatter(bits_of, snr_of, s=18, label=group, alpha=0.8)
    bound = np.array([3.5, 17.0])
    axes.plot(
        bound, 20 * math.log10(2) * bound, color="gray", linewidth=0.8, label="rate-distortion bound, 6.02 dB per bit"
    )
    axes.set(
        xlabel="bits per value, scales included", ylabel="SNR on N(0, 1), dB", title="The catalog of tcfp_jax.formats"
    )
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def _group(made: DataType) -> str:
    if made.residual is not None or (made.scale is not None and made.scale.outer is not None):
        return "two levels"
    if made.number.kind == "codebook":
        return "codebooks"
    if made.scale is None:
        return "unscaled"
    kind = "integers" if made.number.is_integer else "floats"
    return f"{kind}, {'power-of-two' if made.scale.number.kind == 'exponent' else 'float'} scales"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit status: 2 for a name without a meaning, or a file that cannot be written."""
    parser = argparse.ArgumentParser(
        prog="python -m tcfp_jax.formats", description="List the catalog, or show one datatype."
    )
    parser.add_argument("name", nargs="?", help="a datatype of the catalog, or the code of a number")
    parser.add_argument("--table", action="store_true", help="write the table of docs/formats.md")
    parser.add_argument("--plot", type=Path, help="write a plot of SNR against bits to this file")
    options = parser.parse_args(arguments)
    if options.plot is not None:
        try:
            options.plot.touch()
        except OSError as error:
            print(f"--plot {options.plot}: {error.strerror}; name a file in a folder that exists", file=sys.stderr)
            return 2
        _plot(options.plot)
    elif options.table:
        print(_table())
    elif options.name is not None:
        try:
            made = CATALOG[options.name] if options.name in CATALOG else datatype(options.name)
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
    sys.exit(main())
