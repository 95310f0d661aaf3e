"""A task that is not language: a vision Transformer that learns noisy digits, in plain Flax and converted.

    python -m benchmarks.images --json --seeds 8 --budget-seconds 550
    python -m benchmarks.images --json --seeds 8 --resume --budget-seconds 550      # until nothing is left undone

The images are drawn (`benchmarks.glyphs`), new ones for each step, so that no run sees one twice and held-out loss is
training loss without luck. `convert_to_tcfp` converts the model but for its classifier; weights are float32 beside what
a recipe stores, or stored alone with 8-bit moments. Runs are paired with BF16's of the same seed; a run is one compiled
`lax.scan`, and those of another seed take the same program.
"""

import argparse
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

import tcfp_jax
from benchmarks import common, glyphs, pairs, variants
from benchmarks.common import Result, default_dtype
from benchmarks.fork_runs import last_tenth
from benchmarks.pairs import Row
from benchmarks.variants import BASELINE, RERUN, Variant
from models.train import keep_programs
from models.training import jittered
from tcfp_jax.conversion import convert_to_tcfp, find_weights

NAME = "images"
WARM_UP = 10  # a tenth of the steps
B2, WEIGHT_DECAY, CLIP_NORM = 0.95, 0.05, 1.0


NAMES = (BASELINE, RERUN, "tensorwise", "tcfp12_fast", "stored", "nvfp4", "nvfp4_training")
VARIANTS = {name: variants.VARIANTS[name] for name in NAMES}


@dataclass(frozen=True, kw_only=True)
class Config(pairs.Config):
    """Settings of a run.

    Attributes:
      layers, width, heads, patch: of the Transformer.
      steps, batch, learning_rate: of AdamW with a warm-up and a cosine.
      heldout: batches of images that judge a run, the same for all.
    """

    layers: int = 6
    width: int = 256
    heads: int = 4
    patch: int = 4
    steps: int = 3000
    batch: int = 256
    learning_rate: float = 1e-3
    heldout: int = 64
    jax: str = jax.__version__


class Block(nn.Module):
    """Attention and an MLP, each after a norm and around a residual connection."""

    config: Config
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """`[batch, patches, width]` to the same."""
        config = self.config
        attend = nn.MultiHeadDotProductAttention(config.heads, dtype=self.dtype, name="attention")
        x = x + attend(nn.LayerNorm(dtype=self.dtype)(x))
        hidden = nn.Dense(4 * config.width, dtype=self.dtype, name="up")(nn.LayerNorm(dtype=self.dtype)(x))
        return x + nn.Dense(config.width, dtype=self.dtype, name="down")(nn.gelu(hidden))


class VisionTransformer(nn.Module):
    """Images uint8 `[batch, size, size]` to float32 logits `[batch, classes]`, in Flax's own layers.

    Source: Dosovitskiy et al. 2020, "An Image Is Worth 16x16 Words"; the mean of the patches is classified, as in Beyer
    et al. 2022, "Better plain ViT baselines for ImageNet-1k".
    """

    config: Config
    dtype: Any

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        """Classify."""
        config, side = self.config, glyphs.SIZE // self.config.patch
        x = (images.astype(jnp.float32) / 255 - 0.5).astype(self.dtype)
        x = x.reshape(-1, side, config.patch, side, config.patch).swapaxes(2, 3)
        x = nn.Dense(config.width, dtype=self.dtype, name="patches")(x.reshape(-1, side * side, config.patch**2))
        positions = self.param("positions", nn.initializers.normal(0.02), (side * side, config.width), jnp.float32)
        x = x + positions.astype(self.dtype)
        for layer in range(config.layers):
            x = Block(config, self.dtype, name=f"block_{layer}")(x)
        x = nn.LayerNorm(dtype=self.dtype)(x).mean(axis=1)
        return nn.Dense(glyphs.CLASSES, dtype=self.dtype, name="classifier")(x).astype(jnp.float32)


# One run --------------------------------------------------------------------------------------------------------------


def measure_one(config: Config, name: str, seed: int) -> Row:
    """Train and evaluate one variant."""
    started, key = time.perf_counter(), jax.random.key(seed)
    variant, drawn = VARIANTS[name], (_training_images(config, seed), _heldout_images(config))
    found = _program(config, dataclasses.replace(variant, perturbation=0.0))(key, variant.perturbation, *drawn)
    losses, *judged = jax.device_get(found)
    heldout, in_bf16, accuracy = map(float, judged)
    return Row(
        name, seed, last_tenth(np.asarray(losses, np.float64).tolist()), heldout, in_bf16, accuracy,
        time.perf_counter() - started, repr(variant), **common.origin_of_row(),
    )  # fmt: skip


def compile_one(config: Config, name: str) -> None:
    """Compile the program of a variant; BF16 and BF16 of perturbed weights have one."""
    if name == RERUN:
        return
    key = jax.random.key(0)
    draw = lambda batches: jax.eval_shape(lambda: glyphs.draw_images(key, batches, config.batch))
    program: Any = _program(config, VARIANTS[name])
    program.lower(key, 0.0, draw(config.steps), draw(config.heldout)).compile()


@functools.lru_cache(maxsize=1)
def _training_images(config: Config, seed: int) -> Any:
    return glyphs.draw_images(jax.random.fold_in(jax.random.key(seed), 1), config.steps, config.batch)


@functools.lru_cache(maxsize=1)
def _heldout_images(config: Config) -> Any:
    return glyphs.draw_images(jax.random.key(2**31), config.heldout, config.batch)


@functools.lru_cache(maxsize=32)
def _program(config: Config, variant: Variant) -> Callable[..., Any]:
    """The jitted run of a variant: (losses, held-out loss, the same in BF16, accuracy).

    Its arguments are a key, the relative size of a perturbation of the initial weights, and images of both kinds.
    """
    plain = VisionTransformer(config, default_dtype())
    shape = jax.ShapeDtypeStruct((config.batch, glyphs.SIZE, glyphs.SIZE), jnp.uint8)
    model, in_bf16 = (
        convert_to_tcfp(plain, how, shape, include=("linear", "small")) for how in (variant.recipe, "bf16")
    )
    weights = find_weights(model)

    def losses_of(
        params: Any, quantized: Any, images: jax.Array, labels: jax.Array, key: jax.Array | None, model: Any = model
    ) -> tuple[jax.Array, jax.Array]:
        rngs = None if key is None else {"tcfp": key}
        logits: Any = model.apply({"params": params, "tcfp": quantized}, images, rngs=rngs)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean(), jnp.mean(jnp.argmax(logits, -1) == labels)

    def run(key: jax.Array, jitter: float, training: Any, heldout: Any) -> Any:
        weights_key, rounding, moments, products, perturbation = jax.random.split(key, 5)
        params: Any = plain.init(weights_key, jnp.zeros(shape.shape, shape.dtype)[:1])["params"]
        params = jittered(params, perturbation, jitter)  # of zero changes no bit
        if variant.weights == "stored":
            params = tcfp_jax.store(params, weights, key=rounding, gradient_dtype=variant.gradient_dtype)
        optimizer = _optimizer(config, variant, weights, moments)

        def step(carry: Any, given: Any) -> tuple[Any, jax.Array]:
            (params, opt_state), (number, images, labels) = carry, given
            bits = jax.random.fold_in(products, number) if variant.recipe.draws else None
            quantized = tcfp_jax.layer_state(opt_state)
            loss_of = lambda params: losses_of(params, quantized, images, labels, bits)[0]
            loss, gradients = tcfp_jax.value_and_grad(loss_of)(params)
            updates, opt_state = optimizer.update(gradients, opt_state, params)
            return (tcfp_jax.apply_updates(params, updates), opt_state), loss

        numbered = (jnp.arange(config.steps), *training)
        (params, opt_state), losses = jax.lax.scan(step, (params, optimizer.init(params)), numbered)
        quantized, floats = tcfp_jax.layer_state(opt_state), params
        if variant.weights == "stored":
            floats = tcfp_jax.dequantize(params)
        trained = lambda given: losses_of(params, quantized, given[0], given[1], None)
        baseline = lambda given: losses_of(floats, {}, given[0], given[1], None, in_bf16)[0]
        found, accuracy = jax.lax.map(trained, heldout)
        return losses, found.mean(), jax.lax.map(baseline, heldout).mean(), accuracy.mean()

    return jax.jit(run)


def _optimizer(config: Config, variant: Variant, weights: Any, key: jax.Array) -> optax.GradientTransformation:
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, config.learning_rate, max(1, config.steps // WARM_UP), max(2, config.steps)
    )
    options: Any = dict(b2=B2, weight_decay=WEIGHT_DECAY)
    if variant.weights == "stored":
        return tcfp_jax.optim.adamw(schedule, **options, moments=variant.moments, max_norm=CLIP_NORM, key=key)
    return optax.chain(
        optax.clip_by_global_norm(CLIP_NORM), optax.adamw(schedule, **options), tcfp_jax.error_feedback(weights)
    )


def measure(config: Config) -> Iterator[Row]:
    """The runs that are kept, then the wanted ones."""
    return pairs.runs(config, VARIANTS, functools.partial(measure_one, config), functools.partial(compile_one, config))


# The command and its tables -------------------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser) -> None:
    """Variants, seeds, sizes, and when to stop."""
    pairs.add_options(parser, VARIANTS, seeds=5)
    for name in ("layers", "width", "steps"):
        parser.add_argument(f"--{name}", type=int, default=getattr(Config, name), help="(default: %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=Config.learning_rate, help="(default: %(default)g)")


def configure(options: argparse.Namespace) -> Config:
    """The settings of a command line.

    Raises:
      ValueError: as of `pairs.wanted_of`.
    """
    config = Config(
        layers=options.layers, width=options.width, heads=max(1, options.width // 64), steps=options.steps,
        learning_rate=options.learning_rate,
    )  # fmt: skip
    if options.smoke:
        options.seeds, options.variants = 1, options.variants or ",".join((BASELINE, "tensorwise", "stored"))
        config = Config(layers=1, width=32, heads=1, patch=8, steps=6, batch=8, heldout=2)
    if jax.default_backend() == "gpu":  # most of a first run is compilation
        keep_programs(common.ROOT / "runs" / NAME)
    return dataclasses.replace(config, wanted=pairs.wanted_of(options, VARIANTS))


def show(rows: list[Row]) -> None:
    """Print what the rows say of each variant."""
    pairs.show(rows, NAMES)


def table(result: Result) -> str:
    """A line a variant."""
    config = result.config
    meanings = {name: f"`{name}`: {variant.meaning}" for name, variant in VARIANTS.items()}
    lines = pairs.table(pairs.summaries(result, NAMES), meanings, "exp(held-out loss - BF16's)")
    return (
        f"{lines}\n\nA vision Transformer of {config['layers']} layers of width {config['width']} on patches of "
        f"{config['patch']} × {config['patch']}, {config['steps']} steps of {config['batch']} images of "
        f"{glyphs.SIZE} × {glyphs.SIZE}, judged on {config['heldout'] * config['batch']:,} others. "
        f"{pairs.MEANS}"
    )


def plot(figure: Any, result: Result) -> None:
    """A line of dots a variant."""
    title = "exp(held-out loss - that of BF16 with the same seed); the bar is the mean"
    pairs.plot(figure, result, NAMES, title)


main = functools.partial(common.main, NAME)

if __name__ == "__main__":
    common.command(NAME)
