"""Results of runs: the table of the command, and `summary.json`."""

import math
from collections.abc import Iterator
from typing import Any

from .described import describe
from .forms import Stored
from .room import sized
from .running import RunResult
from .settings import TrainConfig
from .text import bits_per_byte


def summary(
    config: TrainConfig, result: RunResult, baseline: RunResult | None
) -> dict[str, Any]:
    """Return the content of `summary.json`."""
    if isinstance(config.weights, Stored):
        config = config.updated(result.update)
    content: dict[str, Any] = {
        "config": {**describe(config, "")["config"], "dtype": config.dtype},
        "run": _numbers(result),
    }
    if baseline is not None:
        ratio = result.heldout_perplexity / baseline.heldout_perplexity
        content |= {
            "baseline_bf16": _numbers(baseline),
            "perplexity_ratio": _finite(ratio),
        }
    return content


def _numbers(result: RunResult) -> dict[str, float | str | None]:
    last = float(result.train_loss[-1])
    return {
        "heldout_loss": _finite(result.heldout_loss),
        "heldout_bits_per_byte": _finite(result.heldout_bits_per_byte),
        "heldout_perplexity": _finite(result.heldout_perplexity),
        "heldout_loss_bf16": _finite(result.heldout_loss_bf16),
        "last_train_loss": _finite(last),
        "last_train_bits_per_byte": _finite(
            bits_per_byte(last, result.bytes_per_token)
        ),
        "bytes_per_token": result.bytes_per_token,
        "tokens_per_second": _finite(result.tokens_per_second),
        "remat": result.remat,
        "update": result.update,
        "state_bytes": result.state_bytes,
        "peak_bytes": result.peak_bytes,
        "skipped_steps": result.skipped_steps,
        **{f"heldout_{name}": value for name, value in result.heldout_rewards.items()},
    }


def _finite(value: float | None) -> float | None:
    """Return a number or None, since JSON has no NaN."""
    return None if value is None or not math.isfinite(value) else value


def table(name: str, result: RunResult, baseline: RunResult | None) -> str:
    """Return a table with a row for each run."""
    if result.heldout_rewards:
        return _table_of_pairs({name: result, "bf16 (baseline)": baseline})
    lines = [
        "",
        f"{'per token':20}{'held-out loss':>15}{'perplexity':>13}{'bits/byte':>11}"
        f"{'tokens/s':>11}{'MB of state':>14}",
        _row(name, result),
    ]
    if baseline:
        lines.append(_row("bf16 (baseline)", baseline))
        ratio = result.heldout_perplexity / baseline.heldout_perplexity
        lines.append(f"perplexity ratio {name} / bf16: {ratio:.4f}")
    return "\n".join(lines)


def remarks(result: RunResult) -> Iterator[str]:
    """Yield lines about speed and memory, and about steps that changed nothing."""
    if math.isnan(result.tokens_per_second):
        yield "tokens/s: not measured, as no step was left or each call compiled\n"
    if result.peak_bytes is not None:
        yield f"peak memory of the device: {sized(result.peak_bytes)}\n"
    in_bf16 = result.heldout_loss_bf16
    if math.isfinite(in_bf16) and in_bf16 != result.heldout_loss:
        yield f"held-out loss of the same weights with BF16 products: {in_bf16:.4f}\n"
    if result.skipped_steps:
        yield (
            f"{result.skipped_steps} steps were skipped, because a gradient was not"
            " finite\n"
        )


def _table_of_pairs(results: dict[str, RunResult | None]) -> str:
    """Return a row for each run of pairs."""
    lines = [
        "",
        f"{'held-out pairs':20}{'loss':>9}{'accuracy':>10}{'margin':>9}{'chosen':>9}"
        f"{'rejected':>10}{'tokens/s':>11}{'MB of state':>14}",
    ]
    for name, result in results.items():
        if result is None:
            continue
        chosen, rejected, accuracy, margin = result.heldout_rewards.values()
        rate = "-"
        if math.isfinite(result.tokens_per_second):
            rate = f"{result.tokens_per_second:,.0f}"
        lines.append(
            f"{name:20}{result.heldout_loss:9.4f}{accuracy:10.1%}{margin:9.3f}"
            f"{chosen:9.3f}{rejected:10.3f}{rate:>11}{result.state_bytes / 1e6:14.1f}"
        )
    return "\n".join(lines)


def _row(name: str, result: RunResult) -> str:
    loss = f"{result.heldout_loss:15.4f}{result.heldout_perplexity:13.4f}"
    bits = rate = "-"
    if result.heldout_bits_per_byte is not None:
        bits = f"{result.heldout_bits_per_byte:.4f}"
    if math.isfinite(result.tokens_per_second):
        rate = f"{result.tokens_per_second:,.0f}"
    return f"{name:20}{loss}{bits:>11}{rate:>11}{result.state_bytes / 1e6:14.1f}"
