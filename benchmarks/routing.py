"""Where routers of a mixture of experts send tokens if products are FP8: forks of a
BF16 run, and their losses.

    python -m benchmarks.routing --json --seeds 3

Bases and forks are those of `benchmarks.convergence`. A choice of a router differs if
BF16's fork does not make it for the same token of held-out text. At the start of a fork
the weights are the same, and only rounding differs; at the end the weights differ, too,
as they do in `bf16_rerun`, which starts from weights that are perturbed by 1e-6.
"""

import argparse
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import tcfp_jax
from benchmarks import common
from benchmarks.common import Result, markdown_table
from benchmarks.forks import Base, Config, advance, start_fork, train_base, train_config
from benchmarks.variants import BASELINE, RERUN, VARIANTS, Variant
from models.batches import check_corpus
from models.families import learner
from models.moe import MOES, MoeConfig
from models.text import Corpus, load_installed
from models.training import TrainState, count_parameters, evaluate

NAME = "routing"
DEFAULT = (BASELINE, RERUN, "stored", "tensorwise")
SMOKE_OPTIONS = {"variants": f"{BASELINE},tensorwise"}
WINDOWS = 32  # of held-out text, whose choices are compared


@dataclass(frozen=True)
class Row:
    """One fork.

    Attributes:
      name, seed, base: The variant, and the base that it continues.
      heldout_loss, ratio: Nats per token, and its perplexity over BF16's of the same
        base.
      differs_at_start, differs: Parts of the choices that differ from BF16's before the
        first step and after the last.
      load: The largest load of an expert over the mean load, as a mean over layers.
      milliseconds: Of a step.
    """

    name: str
    seed: int
    base: str
    heldout_loss: float
    ratio: float
    differs_at_start: float
    differs: float
    load: float
    milliseconds: float


def choices(
    config: Config, variant: Variant, state: TrainState, windows: jax.Array
) -> np.ndarray:
    """Return the experts of each token of the windows, int `[layers, tokens, chosen]`,
    as the variant computes them.
    """
    chosen = _chosen(config, variant)
    return np.concatenate(
        [
            np.asarray(chosen(state, part))
            for part in jnp.split(windows, len(windows) // 2)
        ],
        axis=1,
    )


@functools.cache
def _chosen(config: Config, variant: Variant) -> Callable[[TrainState, jax.Array], Any]:
    """Return the jitted choices of some windows, which start and end of a fork
    share.
    """
    run = train_config(config, variant)
    model = learner(
        config.size, tcfp_jax.recipe(run.recipe), run.compute_dtype, None, run.weights
    ).model

    @jax.jit
    def chosen(state: TrainState, windows: jax.Array) -> Any:
        variables = {
            "params": state.params,
            "tcfp": tcfp_jax.layer_state(state.opt_state),
        }
        return model.apply(variables, windows, mutable="intermediates")[1][
            "intermediates"
        ]["layers"]["chosen"][0]

    return chosen


def difference(found: np.ndarray, wanted: np.ndarray) -> float:
    """Return the part of the choices that are not among the wanted ones of the same
    token.

    >>> difference(np.array([[[0, 1], [2, 3]]]), np.array([[[1, 0], [2, 1]]]))
    0.25
    """
    return float(np.mean(~np.any(found[..., :, None] == wanted[..., None, :], axis=-1)))


def load_of(found: np.ndarray, experts: int) -> float:
    """Return the largest load of an expert over the mean load, as a mean over layers.

    >>> load_of(np.array([[[0, 1], [0, 2]]]), 4)
    2.0
    """
    return float(
        np.mean(
            [
                np.bincount(layer.reshape(-1), minlength=experts).max()
                * experts
                / layer.size
                for layer in found
            ]
        )
    )


def measure(config: Config) -> Iterator[Row]:
    """Train each base and its forks, and compare them with BF16's fork."""
    corpus = load_installed(byte_limit=config.text_bytes)
    text, heldout = jnp.asarray(corpus.train), jnp.asarray(corpus.heldout)
    windows = _windows(config, corpus)
    for seed in config.seeds:
        base = train_base(config, seed, text, corpus.digest, VARIANTS[BASELINE])
        reference: tuple[np.ndarray, np.ndarray, float] | None = None
        for name in config.variants:
            start, end, loss, milliseconds = _fork(
                config, name, base, text, heldout, windows
            )
            reference = (start, end, loss) if reference is None else reference
            print(f"{name}, seed {seed}: held-out {loss:.5f}", flush=True)
            yield Row(
                name,
                seed,
                base.name,
                loss,
                math.exp(loss - reference[2]),
                difference(start, reference[0]),
                difference(end, reference[1]),
                load_of(end, config.size.experts),
                milliseconds,  # type: ignore[union-attr]
            )


def _windows(config: Config, corpus: Corpus) -> jax.Array:
    offsets = np.linspace(
        0, len(corpus.heldout) - config.sequence, min(WINDOWS, config.heldout_windows)
    ).astype(int)
    return jnp.asarray(
        corpus.heldout[offsets[:, None] + np.arange(config.sequence)], jnp.int32
    )


def _fork(
    config: Config,
    name: str,
    base: Base,
    text: jax.Array,
    heldout: jax.Array,
    windows: jax.Array,
) -> tuple[np.ndarray, np.ndarray, float, float]:
    """Return (choices at the start, choices at the end, held-out loss, milliseconds of
    a step).
    """
    variant = VARIANTS[name]
    state = start_fork(config, variant, base.state, jax.random.key(base.seed))
    start = choices(config, variant, state, windows)
    state, _, milliseconds = advance(
        config, variant, base.seed, state, text, config.steps
    )
    loss = evaluate(train_config(config, variant, base.seed), state, heldout)
    return start, choices(config, variant, state, windows), loss, milliseconds


# The command and its table
# --------------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add variants, bases, and steps."""
    parser.add_argument("--variants", help=f"(default: {','.join(DEFAULT)})")
    parser.add_argument(
        "--seeds", type=common.positive, default=1, help="how many bases (default: 1)"
    )
    parser.add_argument(
        "--base-steps",
        type=common.positive,
        default=1000,
        help="before forks (default: 1000)",
    )
    parser.add_argument(
        "--steps", type=common.positive, default=300, help="of a fork (default: 300)"
    )
    parser.add_argument(
        "--batch",
        type=common.positive,
        default=32,
        help="windows of a step (default: 32)",
    )


def configure(options: argparse.Namespace) -> Config:
    """Return the settings of a command line; raise `ValueError` for an unknown
    variant.
    """
    variants = common.chosen_of(
        "variants", options.variants or ",".join(DEFAULT), tuple(VARIANTS)
    )
    name = "moe-109m"
    given: dict[str, Any] = dict(
        batch=options.batch,
        base_steps=options.base_steps,
        steps=options.steps,
        variants=variants,
        seeds=tuple(range(options.seeds)),
    )
    if options.smoke or jax.default_backend() == "cpu":
        small: Any = dict(attention="products", loop="unrolled")
        size = MoeConfig(
            1, 32, heads=2, kv_heads=2, hidden=32, context=32, experts=4, **small
        )
        given |= dict(
            batch=4,
            base_steps=20,
            steps=20,
            warmup_steps=2,
            text_bytes=200_000,
            heldout_windows=4,
        )
        config = Config("smoke", size, sequence=32, learning_rate=1e-2, **given)
    else:
        config = Config(name, MOES[name], **given)
    run = train_config(config, VARIANTS[BASELINE])
    corpus = load_installed(byte_limit=config.text_bytes)
    check_corpus(corpus, run)
    return dataclasses.replace(
        config, text=corpus.digest[:12], parameters=count_parameters(run)
    )


def table(result: Result) -> str:
    """Return the page's table, one line per variant, with means over bases."""
    lines = []
    for name in result.distinct("name"):
        rows = [row for row in result.rows if row["name"] == name]
        mean = lambda field, rows=rows: float(np.mean([row[field] for row in rows]))
        spread = (
            f" ± {np.std([row['ratio'] for row in rows], ddof=1) / len(rows) ** 0.5:.4f}"
            if len(rows) > 1
            else ""
        )
        lines.append(
            [
                f"`{name}`",
                f"{mean('ratio'):.4f}{spread}",
                f"{mean('differs_at_start'):.1%}",
                f"{mean('differs'):.1%}",
                f"{mean('load'):.2f}",
            ]
        )
    titles = [
        "",
        "perplexity over BF16",
        "choices that differ at the start",
        "at the end",
        "largest load over mean",
    ]
    size = result.config["size"]
    return (
        f"{markdown_table(titles, lines)}\n\nForks of {len(result.distinct('base'))}"
        f" BF16 runs of {result.config['parameters'] / 1e6:.0f} million parameters:"
        f" {size['layers']} layers, {size['chosen']} of {size['experts']} experts,"
        f" {result.config['base_steps']} steps and {result.config['steps']} of the"
        " fork."
    )


if __name__ == "__main__":
    common.command(NAME)
