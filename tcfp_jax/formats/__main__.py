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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

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
# Labels of the plot: the offset from the point, in points, and the side that is near the point. A thin line joins them.
_LABELS: dict[str, tuple[int, int, str]] = {
    "mx4": (8, -8, "left"), "mxint4": (22, -14, "left"), "mxfp4e2": (-10, 26, "right"), "nvfp4": (26, -20, "left"),
    "nf4": (-14, 30, "right"), "icb44fi4_e32s8": (-10, 6, "right"), "mx6": (-14, 12, "right"),
    "mxfp6e3": (0, -22, "center"), "mxfp6e2": (-16, 20, "right"), "e4m3fn": (-12, 14, "right"),
    "mxfp8e5": (24, -14, "left"), "mxfp8e4": (26, -2, "left"), "mxint8": (30, -6, "left"), "mx9": (14, -10, "left"),
    "tcfp12": (8, -8, "left"), "bfloat16": (-8, -8, "right"), "float16": (-8, -8, "right"),
}  # fmt: skip
_PANELS = ((3.8, 6.7, 14, 34), (6.8, 16.6, 10, 92))  # first and last bits per value, lowest and highest SNR
_INK, _COLORS = "#808080", ("#3b82c4", "#e08214", "#35a06a", "#c0504d", "#9a6fc4")  # on light and dark grounds
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


def _table() -> Iterator[str]:
    """Yield the lines of a Markdown table of the datatypes of `TABLE`."""
    yield "| datatype | content | bits per value | SNR on N(0, 1), dB |"
    yield "|---|---|--:|--:|"
    for name in TABLE:
        made = CATALOG[name]
        yield f"| `{name}` | {_content(made)} | {made.bits_per_value():.4g} | {_snr_db(made):.1f} |"


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
    """Write a picture with the SNR on N(0, 1) against bits per value, for the whole catalog."""
    import matplotlib
    from matplotlib.figure import Figure

    colored = ("text.", "axes.edge", "axes.label", "xtick.", "ytick.", "grid.")
    style: dict[Any, Any] = {f"{name}color": _INK for name in colored}
    style |= {"axes.facecolor": "none", "svg.hashsalt": "tcfp_jax", "font.size": "9"}
    groups: dict[str, list[tuple[float, float]]] = {}
    points: dict[str, tuple[float, float]] = {}
    for number, (name, made) in enumerate(CATALOG.items(), 1):
        print(f"\r{number} of {len(CATALOG)} datatypes", end="", file=sys.stderr, flush=True)
        points[name] = made.bits_per_value(_SHAPE), _snr_db(made)
        groups.setdefault(_group(made), []).append(points[name])
    print(file=sys.stderr)
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(8.4, 4.4), layout="constrained")
        for axes, (left, right, low, high) in zip(figure.subplots(1, 2), _PANELS, strict=True):
            for color, (group, members) in zip(_COLORS, sorted(groups.items()), strict=True):
                axes.scatter(*zip(*members, strict=True), s=14, label=group, alpha=0.7, color=color, linewidths=0)
            bound = np.array([left, right])
            axes.plot(bound, 20 * math.log10(2) * bound, color=_INK, linewidth=0.8, label="bound, 6.02 dB a bit")
            for name, (across, up, side) in _LABELS.items():
                if left < points[name][0] < right:
                    axes.annotate(
                        name, points[name], xytext=(across, up), textcoords="offset points", fontsize=8, ha=side,
                        va="center", arrowprops={"arrowstyle": "-", "linewidth": 0.5, "color": _INK, "shrinkA": 0},
                    )  # fmt: skip
            axes.set(xlim=(left, right), ylim=(low, high), xlabel="bits per value, scales included")
            axes.set_ylabel("SNR on N(0, 1), dB")
            axes.grid(alpha=0.25)
            axes.spines[["top", "right"]].set_visible(False)
        figure.axes[1].legend(fontsize=8, loc="upper left", framealpha=0)
        figure.savefig(path, transparent=True, **({"metadata": {"Date": None}} if path.suffix == ".svg" else {}))


def _group(made: DataType) -> str:
    if made.residual is not None or (made.scale is not None and made.scale.outer is not None):
        return "two levels"
    if made.number.kind == "codebook":
        return "codebooks"
    if made.scale is None:
        return "unscaled"
    return f"{'power-of-two' if made.scale.number.kind == 'exponent' else 'float'} scales"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit status: 2 for a name without a meaning, or a file that cannot be written."""
    what = "List the catalog, or show one datatype."
    parser = argparse.ArgumentParser(prog="python -m tcfp_jax.formats", description=what)
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
        for line in _table():
            print(line, flush=True)
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
