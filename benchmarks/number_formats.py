"""Draw the plot of docs/formats.md: SNR on N(0, 1) against bits per value, for the
whole catalog.

python -m benchmarks.number_formats docs/plots/formats.svg
"""

import argparse
import math
import sys
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from benchmarks.drawing import BLUE, INK, ORANGE, STYLE
from tcfp_jax.formats import CATALOG, DataType
from tcfp_jax.formats import __main__ as listed

# Labels of the plot: the offset from the point, in points, and the side that is near
# the point. A thin line joins them.
_LABELS: dict[str, tuple[int, int, str]] = {
    "mx4": (8, -8, "left"), "mxint4": (22, -14, "left"), "mxfp4e2": (-10, 26, "right"), "nvfp4": (26, -20, "left"),
    "nf4": (-14, 30, "right"), "icb44fi4_e32s8": (-10, 6, "right"), "mx6": (-14, 12, "right"),
    "mxfp6e3": (0, -22, "center"), "mxfp6e2": (-16, 20, "right"), "e4m3fn": (-12, 14, "right"),
    "mxfp8e5": (24, -14, "left"), "mxfp8e4": (26, -2, "left"), "mxint8": (30, -6, "left"), "mx9": (14, -10, "left"),
    "tcfp12": (8, -8, "left"), "bfloat16": (-8, -8, "right"), "float16": (-8, -8, "right"),
}  # fmt: skip
# First and last bits per value, lowest and highest SNR
_PANELS = ((3.8, 6.7, 14, 34), (6.8, 16.6, 10, 92))
_COLORS = (BLUE, ORANGE, "#35a06a", "#c0504d", "#9a6fc4")  # on light and dark grounds


def draw(path: Path) -> None:
    """Write a picture with the SNR on N(0, 1) against bits per value, for the whole
    catalog.
    """
    groups: dict[str, list[tuple[float, float]]] = {}
    points: dict[str, tuple[float, float]] = {}
    for number, (name, made) in enumerate(CATALOG.items(), 1):
        print(
            f"\r{number} of {len(CATALOG)} datatypes",
            end="",
            file=sys.stderr,
            flush=True,
        )
        points[name] = made.bits_per_value(listed._SHAPE), listed._snr_db(made)
        groups.setdefault(_group(made), []).append(points[name])
    print(file=sys.stderr)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8.4, 4.4), layout="constrained")
        for axes, (left, right, low, high) in zip(
            figure.subplots(1, 2), _PANELS, strict=True
        ):
            for color, (group, members) in zip(
                _COLORS, sorted(groups.items()), strict=True
            ):
                axes.scatter(
                    *zip(*members, strict=True),
                    s=14,
                    label=group,
                    alpha=0.7,
                    color=color,
                    linewidths=0,
                )
            bound = np.array([left, right])
            axes.plot(
                bound,
                20 * math.log10(2) * bound,
                color=INK,
                linewidth=0.8,
                label="bound, 6.02 dB a bit",
            )
            for name, (across, up, side) in _LABELS.items():
                if left < points[name][0] < right:
                    axes.annotate(
                        name,
                        points[name],
                        xytext=(across, up),
                        textcoords="offset points",
                        fontsize=8,
                        ha=side,
                        va="center",
                        arrowprops={
                            "arrowstyle": "-",
                            "linewidth": 0.5,
                            "color": INK,
                            "shrinkA": 0,
                        },
                    )
            axes.set(
                xlim=(left, right),
                ylim=(low, high),
                xlabel="bits per value, scales included",
            )
            axes.set_ylabel("SNR on N(0, 1), dB")
            axes.grid()
        figure.axes[1].legend(fontsize=8, loc="upper left", framealpha=0)
        figure.savefig(
            path,
            transparent=True,
            **({"metadata": {"Date": None}} if path.suffix == ".svg" else {}),
        )


def _group(made: DataType) -> str:
    if made.residual is not None or (
        made.scale is not None and made.scale.outer is not None
    ):
        return "two levels"
    if made.number.kind == "codebook":
        return "codebooks"
    if made.scale is None:
        return "unscaled"
    return (
        f"{'power-of-two' if made.scale.number.kind == 'exponent' else 'float'} scales"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.number_formats", description=__doc__.split(":")[0]
    )
    parser.add_argument("path", type=Path, help="an SVG or PNG")
    draw(parser.parse_args().path)
