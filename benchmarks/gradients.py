"""What `benchmarks.fidelity` compares: a model's gradients and products as a recipe has them, and as float32 has them.

A matrix is named by its kind and layer, such as "qkv 3", whether its model has a parameter for each layer or a stack.
"""

import functools
import math
import re
import statistics
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import tcfp_jax
from models.families import FAMILIES, family_of, learner
from models.settings import TrainConfig
from models.training import loss_function
from tcfp_jax import paths
from tcfp_jax.conversion.observation import operands
from tcfp_jax.conversion.transform import transform
from tcfp_jax.recipes import recipe

# What the census finds of products does not depend on the recipe, nor do their operands in the float model. Every
# kernel is named, because a product whose precision was asked for is left alone otherwise; tables and heads stay.
_ANY_RECIPE = "tensorwise"
RULES = {"^(embedding|head)": None, "kernel$": _ANY_RECIPE}
Agreement = tuple[float, float]  # SNR in dB, cosine


@dataclass(frozen=True)
class Reference:
    """What float32 says of a checkpoint.

    Attributes:
      params: float32.
      batches: windows of tokens `[batch, sequence + 1]`.
      losses, gradients: of each batch; gradients by path.
      stacks: of each parameter that is a matrix or a stack of them, how many axes the stack has.
      matrices: (x, w, g) of every matrix, by name, in the order of layers.
    """

    params: Any
    batches: tuple[jax.Array, ...]
    losses: tuple[float, ...]
    gradients: tuple[dict[str, jax.Array], ...]
    stacks: dict[str, int]
    matrices: dict[str, tuple[jax.Array, jax.Array, jax.Array]]


def refer(run: TrainConfig, params: Any, batches: tuple[jax.Array, ...], alone: int) -> Reference:
    """Gradients of the model in float32, and operands of its products of so many windows of the first batch."""
    model = FAMILIES[family_of(run.size)].plain(run.size, "float32")

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        of_tokens: Any = model.apply({"params": params}, tokens[:, :-1], tokens[:, 1:])
        return of_tokens.mean()

    gradient, converted = _exactly(jax.value_and_grad(loss)), transform(loss, _ANY_RECIPE, rules=RULES)

    def capture(params: Any, tokens: jax.Array) -> Any:
        leaves, captured = paths.leaves(params), {}
        for path, (x, g) in operands(converted, params, tokens).items():
            places = matrices_of(path, x.shape[:-2])
            captured[path] = {name: (x[place], leaves[path][place], g[place]) for name, place in places.items()}
        return captured

    found, captured = [gradient(params, batch) for batch in batches], _exactly(capture)(params, batches[0][:alone])
    matrices = {name: given for of_path in captured.values() for name, given in of_path.items()}
    leaves = paths.leaves(params)
    return Reference(
        params, batches, tuple(float(loss) for loss, _ in found), tuple(paths.leaves(g) for _, g in found),
        {path: leaves[path].ndim - 2 for path in captured},
        dict(sorted(matrices.items(), key=lambda item: place_of(item[0]))),
    )  # fmt: skip


def _exactly(function: Callable[..., Any]) -> Callable[..., Any]:
    """The jitted function, whose products of floats have the highest precision."""

    def with_precision(*args: Any) -> Any:
        with jax.default_matmul_precision("highest"):
            return function(*args)

    return jax.jit(with_precision)


def matrices_of(path: str, stack: tuple[int, ...]) -> dict[str, Any]:
    """The matrices of a parameter: their names, and where in the parameter they are.

    >>> matrices_of("block_3/qkv/kernel", ()), matrices_of("layers/up/kernel", (2,))
    ({'qkv 3': ()}, {'up 0': (0,), 'up 1': (1,)})
    """
    *blocks, kind, _ = path.split("/")
    if stack:
        return {f"{kind} {number}": place for number, place in enumerate(np.ndindex(*stack))}
    layer = re.search(r"\d+", "/".join(blocks))
    return {f"{kind} {layer[0] if layer else 0}": ()}


def place_of(name: str) -> tuple[int, str]:
    """(layer, kind) of a matrix.

    >>> place_of("qkv 3")
    (3, 'qkv')
    """
    kind, layer = name.rsplit(" ", 1)
    return int(layer), kind


# A way to train -------------------------------------------------------------------------------------------------------


def _weights_of(run: TrainConfig, params: Any, key: jax.Array) -> Any:
    """The parameters as a way stores them."""
    if run.weights == "float":
        return params
    weights = learner(run.size, recipe(run.recipe), run.compute_dtype).weights
    return tcfp_jax.store(params, weights, key=key)


@functools.cache
def _whole_of(run: TrainConfig) -> Any:
    """The jitted loss and gradients by path, of parameters, windows and a key."""
    loss_of = loss_function(run)

    def whole(params: Any, batch: jax.Array, key: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        loss, gradients = tcfp_jax.value_and_grad(loss_of)(params, {}, batch, _bits(run, key))
        return loss, paths.leaves(gradients)

    return jax.jit(whole)


@functools.cache
def _alone_of(run: TrainConfig) -> Any:
    """The jitted sums of one product's three results, `[3, 3]`, of x, w, g and a key, all float32."""
    chosen = recipe(run.recipe)

    def alone(x: jax.Array, w: jax.Array, g: jax.Array, key: jax.Array) -> jax.Array:
        kernel: Any = {"kernel": w}
        if run.weights == "stored":
            kernel = tcfp_jax.store(kernel, chosen, key=key)

        def product(kernel: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            y = tcfp_jax.matmul(x, kernel["kernel"], recipe=chosen, key=_bits(run, key))
            return jnp.vdot(y, g), y  # whose gradient is g

        (_, y), (dw, dx) = tcfp_jax.value_and_grad(product, (0, 1), has_aux=True)(kernel, x)
        exact = functools.partial(jnp.matmul, precision="highest")
        pairs = ((exact(x, w), y), (exact(g, w.T), dx), (exact(x.T, g), dw["kernel"]))
        return jnp.stack([_sums(reference, value) for reference, value in pairs])

    return jax.jit(alone)


def _bits(run: TrainConfig, key: jax.Array) -> jax.Array | None:
    chosen = recipe(run.recipe)
    return key if chosen.stochastic or chosen.draws else None


def _sums(reference: jax.Array, value: jax.Array, stack: int = 0) -> jax.Array:
    """Squares of the reference, of the difference, and of the value, summed over all but the first axes."""
    value, axes = value.astype(jnp.float32), tuple(range(stack, value.ndim))
    return jnp.stack([jnp.sum(jnp.square(v), axes) for v in (reference, value - reference, value)], -1)


def _compared(stacks: Mapping[str, int], reference: Any, value: Any) -> dict[str, jax.Array]:
    return {path: _sums(exact, value[path], stacks.get(path, 0)) for path, exact in reference.items()}


@jax.jit
def _added(a: Any, b: Any) -> Any:
    return jax.tree.map(lambda a, b: a.astype(jnp.float32) + b.astype(jnp.float32), a, b)


def agreement(sums: Any) -> Agreement:
    """(SNR in dB, cosine) of the sum of squares of a reference, of the difference to it, and of the value.

    >>> agreement((100.0, 1.0, 101.0))
    (20.0, 0.9950371902099893)
    """
    signal, noise, energy = map(float, sums)
    if not (math.isfinite(noise) and signal):
        return math.nan, math.nan
    snr_db = 10 * math.log10(signal / noise) if noise else math.inf
    return snr_db, (signal + energy - noise) / (2 * math.sqrt(signal * energy)) if energy else 0.0


# Comparison -----------------------------------------------------------------------------------------------------------

# The programs of a way as they will be compiled: of the whole model by None, of products by the shapes of x, w and g.
Programs = dict[Any, Future[Any]]


def compiled(run: TrainConfig, reference: Reference, pool: Executor) -> Programs:
    """Trace a way's programs, and let a pool compile them."""
    key = jax.random.key(0)
    params = jax.eval_shape(functools.partial(_weights_of, run), reference.params, key)
    lowered = {None: _whole_of(run).lower(params, reference.batches[0], key)}
    for given in reference.matrices.values():
        if _shapes(given) not in lowered:
            lowered[_shapes(given)] = _alone_of(run).lower(*given, key)
    return {shapes: pool.submit(program.compile) for shapes, program in lowered.items()}


def _shapes(given: tuple[jax.Array, ...]) -> Any:
    return tuple(array.shape for array in given)


class Whole(NamedTuple):
    """A way's gradients against the reference's.

    Attributes:
      loss: what the way adds to it, mean over the batches.
      gradient: of all batches and parameters.
      mean: of the mean of the batches' gradients.
      common: the share of the error's energy that is the same in every batch: 0 of errors that are random over batches,
        1 of one that a mean over batches keeps; NaN of a single batch.
      matrices: of each matrix, over all batches, by name.
    """

    loss: float
    gradient: Agreement
    mean: Agreement
    common: float
    matrices: dict[str, Agreement]


def compare_whole(run: TrainConfig, reference: Reference, programs: Programs, key: jax.Array) -> Whole:
    """Compare the gradients of the model."""
    program, stacks = programs[None].result(), reference.stacks
    compare = jax.jit(functools.partial(_compared, stacks))
    everything = lambda sums: np.sum([np.reshape(one, (-1, 3)).sum(0) for one in sums.values()], axis=0)
    params = jax.jit(functools.partial(_weights_of, run))(reference.params, key)
    more: list[float] = []
    sums: dict[str, np.ndarray] = {}
    totals: Any = None
    for number, (batch, exact) in enumerate(zip(reference.batches, reference.gradients, strict=True)):
        loss, found = program(params, batch, jax.random.fold_in(key, number))
        more.append(float(loss) - reference.losses[number])
        for path, one in compare(exact, found).items():
            sums[path] = sums.get(path, 0.0) + np.asarray(one, np.float64)
        totals = (exact, found) if totals is None else _added(totals, (exact, found))
    single, added = everything(sums), everything({p: np.asarray(v, np.float64) for p, v in compare(*totals).items()})
    matrices = {
        name: agreement(sums[path][place])
        for path, count in stacks.items()
        for name, place in matrices_of(path, sums[path].shape[:count]).items()
    }
    ordered = {name: matrices[name] for name in reference.matrices}
    common = common_share(float(single[1]), float(added[1]), len(more))
    return Whole(statistics.fmean(more), agreement(single), agreement(added), common, ordered)


def common_share(single: float, added: float, count: int) -> float:
    """Of so many errors, with the sum of their energies and the energy of their sum, the share that all have.

    >>> common_share(2.0, 2.0, 2), common_share(2.0, 4.0, 2)
    (0.0, 1.0)
    """
    return (added / single - 1) / (count - 1) if count > 1 and single else math.nan


def compare_alone(reference: Reference, programs: Programs, key: jax.Array) -> dict[str, tuple[Agreement, ...]]:
    """Compare forward, dgrad and wgrad of each matrix alone, by name."""
    found = {}
    for number, (name, given) in enumerate(reference.matrices.items()):
        sums = programs[_shapes(given)].result()(*given, jax.random.fold_in(key, number))
        found[name] = tuple(map(agreement, np.asarray(sums, np.float64)))
    return found
