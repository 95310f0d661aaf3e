"""Small models of other people's packages, real classes with few and narrow layers, and what they are trained on.

Each is made by one function, which imports its package: a test skips where that is not installed. Parameters are
NumPy's normal values in the shapes that the package's own initialization has, so nothing is compiled to make them.
"""

import contextlib
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

Kind = Literal["function", "linen", "nnx"]
BATCH, LENGTH, VOCABULARY, WIDTH = 2, 8, 64, 32
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


@dataclass(frozen=True)
class Made:
    """A model with all that a call of it takes.

    Attributes:
      model: a function `(params, *inputs)`, a Linen module or an NNX model.
      inputs: positional arguments.
      params: of a function, or of a Linen module (its collection "params"); None for NNX.
      options: keyword arguments of the call.
      rest: other collections of a Linen module.
      apply_options: keyword arguments of Linen's `apply`: mutable, rngs, method.
      select: the floats that the loss is made of, from the model's output.
      context: what to be in when the model is called, such as a mesh.
    """

    model: Any
    inputs: tuple[Any, ...]
    params: Any = None
    options: Mapping[str, Any] = field(default_factory=dict)
    rest: Mapping[str, Any] = field(default_factory=dict)
    apply_options: Mapping[str, Any] = field(default_factory=dict)
    select: Callable[[Any], jax.Array] = lambda output: output
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext


@dataclass(frozen=True)
class Subject:
    """One model.

    Attributes:
      name: of package and model.
      kind: how it is called.
      make: makes it.
      products: how many products of parameters the issue's transformation must convert, and how many there are.
      packages: names of modules without which it cannot be made.
      target: "tokens", cross entropy against random classes, or "square", distance from random values.
    """

    name: str
    kind: Kind
    make: Callable[[], Made]
    products: tuple[int, int]
    packages: tuple[str, ...] = ()
    target: Literal["tokens", "square"] = "tokens"
    rate: float = 3e-3

    def __str__(self) -> str:
        return self.name


SUBJECTS: list[Subject] = []


def subject(name: str, kind: Kind, products: tuple[int, int], *packages: str, **options: Any) -> Callable[..., Any]:
    """Enter what the decorated function makes; arguments after `name` are those of `Subject`."""

    def enter(make: Callable[[], Made]) -> Callable[[], Made]:
        SUBJECTS.append(Subject(name, kind, make, products, packages, **options))
        return make

    return enter


def loss_of(values: jax.Array, target: str) -> jax.Array:
    """Distance of a model's output from fixed random targets, float32."""
    rng = np.random.default_rng(7)
    values = values.astype(jnp.float32)
    if target == "square":
        return jnp.mean((values - rng.standard_normal(values.shape).astype(np.float32)) ** 2)
    classes = rng.integers(0, values.shape[-1], values.shape[:-1])
    return -jnp.take_along_axis(jax.nn.log_softmax(values), classes[..., None], -1).mean()


def pure(made: Made, kind: Kind) -> tuple[Callable[..., Any], Any, tuple[Any, ...]]:
    """`(fn, params, inputs)` of any subject: `fn(params, *inputs)` are the floats of the loss; options come last."""
    inputs = (*made.inputs, dict(made.options))
    if kind == "nnx":
        from flax import nnx

        graph, trained, rest = nnx.split(made.model, nnx.Param, ...)

        def call(params: Any, *inputs: Any) -> Any:
            *given, options = inputs
            return made.select(nnx.merge(graph, params, rest, copy=True)(*given, **options))

        return call, trained, inputs

    def apply(params: Any, *inputs: Any) -> Any:
        *given, options = inputs
        if kind == "function":
            return made.select(made.model(params, *given, **options))
        variables = {"params": params, **made.rest}
        return made.select(made.model.apply(variables, *given, **made.apply_options, **options))

    return apply, made.params, inputs


def filled(tree: Any, seed: int = 0) -> Any:
    """Arrays in the place of shapes: scales and variances one, biases and means zero, matrices normal."""
    rng = np.random.default_rng(seed)

    def fill(path: Any, leaf: Any) -> Any:
        name = jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value").lower()
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.key(seed)
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return jnp.zeros(leaf.shape, leaf.dtype)
        if leaf.ndim < 2 or any(word in name for word in ("scale", "norm", "bias")):
            ones = any(word in name.rsplit("/", 1)[-1] for word in ("scale", "var", "sigma", "weight", "w"))
            return jnp.full(leaf.shape, float(ones and "bias" not in name), leaf.dtype)
        # Of a kernel [k, heads, d], wherever a stack of layers has its axis, k; too large ones make attention sharp.
        filters = "conv" in name or "patch" in name
        fan_in = math.prod(leaf.shape[:-1]) if filters else max(leaf.shape[:-1])
        return jnp.asarray(rng.standard_normal(leaf.shape) / np.sqrt(fan_in), leaf.dtype)

    return jax.tree_util.tree_map_with_path(fill, tree)


def tokens(*shape: int) -> jax.Array:
    """Random tokens, `[batch, length]` unless told."""
    return jnp.asarray(np.random.default_rng(3).integers(1, VOCABULARY, shape or (BATCH, LENGTH)), jnp.int32)


def floats(*shape: int) -> jax.Array:
    """Random normal values."""
    return jnp.asarray(np.random.default_rng(4).standard_normal(shape), jnp.float32)


def linen_made(module: Any, *inputs: Any, options: Mapping[str, Any] | None = None, **more: Any) -> Made:
    """A Linen module with values in all its variables."""
    options = dict(options or {})
    rngs = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    shapes = jax.eval_shape(lambda: module.init(rngs, *inputs, **options))
    variables = dict(filled(shapes))
    return Made(module, inputs, variables.pop("params"), options=options, rest=variables, **more)


def without_meshes() -> None:
    """What importing tunix does to Flax: variables with a sharding may be made where there is no mesh.

    `conftest.py` takes it back after each test, so a subject that needs it asks for it.
    """
    import flax

    flax.config.update("flax_always_shard_variable", False)


def nnx_made(make: Callable[[Any], Any], *inputs: Any, **more: Any) -> Made:
    """An NNX model, `make(rngs)`, with values in all its variables."""
    from flax import nnx

    graph, state = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))))
    return Made(nnx.merge(graph, filled(state)), inputs, **more)
