"""A small classification task: scikit-learn's handwritten digits, and an MLP that learns them.

1797 images of 8 x 8 pixels. A fixed permutation holds out a fifth, so that every run is evaluated on the same images.
Initial weights and batches depend only on the seed. A whole run is one compiled `lax.scan`.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import tcfp_jax
from models.mlp import MLP
from tcfp_jax.recipes import Recipe, recipe

FEATURES = (256, 256, 10)
HELDOUT_PARTS = 5


@dataclass(frozen=True)
class DigitsConfig:
    """One run.

    Attributes:
      recipe: Recipe of every layer.
      steps, batch, learning_rate: Settings of AdamW with a cosine schedule.
      seed: Seed of initial weights, batches and stochastic rounding.
      initial_jitter: Relative deviation of a perturbation of the initial weights, as in `models.train`.
    """

    recipe: Recipe
    steps: int = 400
    batch: int = 128
    learning_rate: float = 1e-3
    seed: int = 0
    initial_jitter: float = 0.0


@dataclass(frozen=True)
class DigitsResult:
    """Training loss per step; of held-out images cross-entropy (nats), also with BF16 products, and accuracy."""

    train_loss: np.ndarray
    heldout_loss: float
    heldout_loss_bf16: float
    heldout_accuracy: float


@functools.lru_cache(maxsize=1)
def load_digits() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return (training images, labels, held-out images, labels); images are float32 `[count, 64]` in [0, 1]."""
    # Imported here, because it takes seconds that other benchmarks can save.
    from sklearn import datasets

    images, labels = datasets.load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    images, labels = (images[order] / 16).astype(np.float32), labels[order].astype(np.int32)
    heldout = len(images) // HELDOUT_PARTS
    return images[heldout:], labels[heldout:], images[:heldout], labels[:heldout]


def run(config: DigitsConfig) -> DigitsResult:
    """Train, and evaluate with the weights that the layers train with."""
    data = tuple(map(jnp.asarray, load_digits()))
    losses, heldout_loss, in_bf16, accuracy = _program(replace(config, seed=0))(jax.random.key(config.seed), data)
    return DigitsResult(np.asarray(losses, np.float64), float(heldout_loss), float(in_bf16), float(accuracy))


@functools.lru_cache(maxsize=32)
def _program(config: DigitsConfig) -> Callable[..., tuple[jax.Array, jax.Array, jax.Array, jax.Array]]:
    dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16  # CPUs emulate BF16
    trained, in_bf16 = (MLP(FEATURES, recipe=r, dtype=dtype) for r in (config.recipe, "bf16"))

    def losses_of(
        params: Any, quantized: Any, images: jax.Array, labels: jax.Array, model: MLP = trained
    ) -> tuple[jax.Array, jax.Array]:
        logits: Any = model.apply({"params": params, "tcfp": quantized}, images)
        logits = logits.astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels), logits

    @jax.jit
    def program(key: jax.Array, data: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        images, labels, heldout_images, heldout_labels = data
        weights_key, batches_key, rounding_key, jitter_key = jax.random.split(key, 4)
        optimizer = _optimizer(config, rounding_key)
        # The parameters are the same for every recipe.
        params = MLP(FEATURES, recipe="bf16").init(weights_key, images[:1])["params"]
        if config.initial_jitter:
            params = jax.tree.map(
                lambda w: w * (1 + config.initial_jitter * jax.random.normal(jitter_key, w.shape)), params
            )

        def step(carry: Any, t: jax.Array) -> tuple[Any, jax.Array]:
            params, opt_state = carry
            chosen = jax.random.randint(jax.random.fold_in(batches_key, t), (config.batch,), 0, images.shape[0])
            quantized = tcfp_jax.layer_state(opt_state)
            loss, gradients = jax.value_and_grad(
                lambda p: losses_of(p, quantized, images[chosen], labels[chosen])[0].mean()
            )(params)
            updates, opt_state = optimizer.update(gradients, opt_state, params)
            return (optax.apply_updates(params, updates), opt_state), loss

        (params, opt_state), losses = jax.lax.scan(step, (params, optimizer.init(params)), jnp.arange(config.steps))
        heldout, logits = losses_of(params, tcfp_jax.layer_state(opt_state), heldout_images, heldout_labels)
        heldout_bf16, _ = losses_of(params, {}, heldout_images, heldout_labels, in_bf16)
        return losses, heldout.mean(), heldout_bf16.mean(), jnp.mean(jnp.argmax(logits, -1) == heldout_labels)

    return program


def _optimizer(config: DigitsConfig, rounding_key: jax.Array) -> optax.GradientTransformation:
    key = rounding_key if recipe(config.recipe).stochastic else None
    schedule = optax.cosine_decay_schedule(config.learning_rate, config.steps)
    return optax.chain(optax.adamw(schedule), tcfp_jax.error_feedback(config.recipe, key=key))
