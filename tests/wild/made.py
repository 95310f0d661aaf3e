"""Small models of other people's packages: real classes with few and narrow layers, and
data to train them.

One function makes each of them and imports its package; a test skips if that is not
installed. Parameters are random normal values of NumPy in the shapes of the package's
own initialization, so that nothing must be compiled.
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
    """A model with the arguments of a call.

    Attributes:
      model: A function `(params, *inputs)`, a Linen module or an NNX model.
      inputs: Positional arguments.
      params: Parameters of a function or of a Linen module (its collection "params");
        None for NNX.
      options: Keyword arguments of the call.
      rest: Other collections of a Linen module.
      apply_options: Keyword arguments of Linen's `apply`: mutable, rngs, method.
      select: Function that takes the floats of the loss from the output.
      context: Context of every call, such as a mesh.
    """

    model: Any
    inputs: tuple[Any, ...]
    params: Any = None
    options: Mapping[str, Any] = field(default_factory=dict)
    rest: Mapping[str, Any] = field(default_factory=dict)
    apply_options: Mapping[str, Any] = field(default_factory=dict)
    select: Callable[[Any], jax.Array] = lambda output: output
    context: Callable[[], contextlib.AbstractContextManager[Any]] = (
        contextlib.nullcontext
    )


@dataclass(frozen=True)
class Subject:
    """One model.

    Attributes:
      name: Names of package and model.
      kind: Kind of the call.
      make: Function that makes it.
      products: Number of products of parameters that conversion must convert, and
        number of all.
      packages: Modules that it needs.
      target: "tokens", cross entropy against random classes, or "square", distance from
        random values.
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


def subject(
    name: str, kind: Kind, products: tuple[int, int], *packages: str, **options: Any
) -> Callable[..., Any]:
    """Register the decorated function as a subject; arguments after `name` are fields
    of `Subject`.
    """

    def enter(make: Callable[[], Made]) -> Callable[[], Made]:
        SUBJECTS.append(Subject(name, kind, make, products, packages, **options))
        return make

    return enter


def loss_of(values: jax.Array, target: str) -> jax.Array:
    """Return the distance of a model's output from fixed random targets, float32."""
    rng = np.random.default_rng(7)
    values = values.astype(jnp.float32)
    if target == "square":
        return jnp.mean(
            (values - rng.standard_normal(values.shape).astype(np.float32)) ** 2
        )
    classes = rng.integers(0, values.shape[-1], values.shape[:-1])
    return -jnp.take_along_axis(
        jax.nn.log_softmax(values), classes[..., None], -1
    ).mean()


def pure(made: Made, kind: Kind) -> tuple[Callable[..., Any], Any, tuple[Any, ...]]:
    """Return `(fn, params, inputs)` of any subject: `fn(params, *inputs)` returns the
    floats of the loss.
    """
    inputs = (*made.inputs, dict(made.options))
    if kind == "nnx":
        from flax import nnx

        graph, trained, rest = nnx.split(made.model, nnx.Param, ...)

        def call(params: Any, *inputs: Any) -> Any:
            *given, options = inputs
            return made.select(
                nnx.merge(graph, params, rest, copy=True)(*given, **options)
            )

        return call, trained, inputs

    def apply(params: Any, *inputs: Any) -> Any:
        *given, options = inputs
        if kind == "function":
            return made.select(made.model(params, *given, **options))
        variables = {"params": params, **made.rest}
        return made.select(
            made.model.apply(variables, *given, **made.apply_options, **options)
        )

    return apply, made.params, inputs


def filled(tree: Any, seed: int = 0) -> Any:
    """Replace shapes by arrays: scales and variances one, biases and means zero,
    matrices normal.
    """
    rng = np.random.default_rng(seed)

    def fill(path: Any, leaf: Any) -> Any:
        name = (
            jax.tree_util.keystr(path, simple=True, separator="/")
            .removesuffix("/value")
            .lower()
        )
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.key(seed)
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return jnp.zeros(leaf.shape, leaf.dtype)
        if leaf.ndim < 2 or any(word in name for word in ("scale", "norm", "bias")):
            ones = any(
                word in name.rsplit("/", 1)[-1]
                for word in ("scale", "var", "sigma", "weight", "w")
            )
            return jnp.full(leaf.shape, float(ones and "bias" not in name), leaf.dtype)
        # The contraction of a kernel [k, heads, d] is k, also in a stack; larger values
        # make attention sharp.
        filters = "conv" in name or "patch" in name
        fan_in = math.prod(leaf.shape[:-1]) if filters else max(leaf.shape[:-1])
        return jnp.asarray(
            rng.standard_normal(leaf.shape) / np.sqrt(fan_in), leaf.dtype
        )

    return jax.tree_util.tree_map_with_path(fill, tree)


def tokens(*shape: int) -> jax.Array:
    """Return random tokens, by default `[batch, length]`."""
    return jnp.asarray(
        np.random.default_rng(3).integers(1, VOCABULARY, shape or (BATCH, LENGTH)),
        jnp.int32,
    )


def floats(*shape: int) -> jax.Array:
    """Return random normal values."""
    return jnp.asarray(np.random.default_rng(4).standard_normal(shape), jnp.float32)


def linen_made(
    module: Any, *inputs: Any, options: Mapping[str, Any] | None = None, **more: Any
) -> Made:
    """Return a Linen module with values in all its variables."""
    options = dict(options or {})
    rngs = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    shapes = jax.eval_shape(lambda: module.init(rngs, *inputs, **options))
    variables = dict(filled(shapes))
    return Made(
        module, inputs, variables.pop("params"), options=options, rest=variables, **more
    )


def without_meshes() -> None:
    """Let Flax make variables with a sharding outside of a mesh, as importing tunix
    does.

    `conftest.py` reverts it after each test, so a subject that needs it calls this.
    """
    import flax

    flax.config.update("flax_always_shard_variable", False)


def nnx_made(make: Callable[[Any], Any], *inputs: Any, **more: Any) -> Made:
    """Return an NNX model, `make(rngs)`, with values in all its variables."""
    from flax import nnx

    graph, state = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))))
    return Made(nnx.merge(graph, filled(state)), inputs, **more)
