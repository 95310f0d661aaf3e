"""`transform(fn, recipe)`: a JAX function with the products of its parameters in low precision.

    low = transform(apply, "tcfp12_fast")                                       # apply(params, x)
    tx = optax.chain(optax.adamw(3e-4), error_feedback(find_weights(low, params, x)))
    loss = lambda params, stored: jnp.mean(low(params, x, stored=stored) ** 2)  # stored: layer_state(opt_state)

A call traces the function, the census finds its products, the policy chooses their recipes, and the evaluation runs the
program again with them. No step looks at types of layers, and nothing of JAX is patched. Each call evaluates its own
program, so it cannot meet the cache of another function.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import jax
from flax import linen as nn
from flax import nnx
from jax.typing import DTypeLike

from tcfp_jax import paths
from tcfp_jax.conversion.census import Fact, census
from tcfp_jax.conversion.evaluate import Machine, bare
from tcfp_jax.conversion.policy import Examined, Include, Policy, Rules, judge, policy
from tcfp_jax.conversion.report import check_state, check_strict, nothing_converted
from tcfp_jax.conversion.shown import Shown
from tcfp_jax.conversion.trace import SHAPES, arrays_in, is_array, trace
from tcfp_jax.conversion.views import View
from tcfp_jax.paths import PyTree
from tcfp_jax.recipes import Recipe
from tcfp_jax.weights.freshness import current
from tcfp_jax.weights.layout import Weight
from tcfp_jax.weights.stored import Stored, quantize_weight
from tcfp_jax.weights.tcfp12 import PackedTCFP12, fake_quantize
from tcfp_jax.weights.training import is_stored, kernel_of, training_of

_Tree = Mapping[str, PyTree]  # weights by path, or nested mappings
_Args = tuple[PyTree, ...]


class Transformed:
    """A function from `transform`. Call it as the function itself.

    Attributes:
      function: the function that was transformed.
      policy: the request.
      name: name of the function in messages.
    """

    def __init__(
        self, function: Callable[..., PyTree], chosen: Policy, params: int, *, strict: bool = False, name: str = "",
        prefix: str = "", stateful: bool = False,
    ) -> None:  # fmt: skip
        """Take the argument with the parameters; that after it may be other state, such as running averages."""
        functools.update_wrapper(self, function, updated=())
        self.name = name or getattr(function, "__name__", type(function).__name__)
        self.function, self.policy, self._params, self._strict = function, chosen, params, strict
        self._prefix, self._stateful = prefix, stateful

    def __call__(
        self, *args: PyTree, stored: _Tree | None = None, product_key: jax.Array | None = None, **kwargs: PyTree
    ) -> PyTree:
        """Return the function's result.

        Args:
          args: arguments of the function. Parameters may come from `tcfp_jax.store`; a parameter that exists only in
            `stored` is a `jax.ShapeDtypeStruct`.
          stored: `layer_state` or `quantize_params` of the parameters; others are quantized at each use.
          product_key: key of FP4 training's random bits; pass another one at each step.
          kwargs: keyword arguments of the function.

        Raises:
          ValueError: nothing can be converted, with `strict` something cannot, or `stored` belongs to other parameters.
        """
        found = self.examine(*args, **kwargs)
        left = not found.report.converted and not found.report.weighed
        if left and self.policy.recipe is not None and not self.policy.off:
            raise nothing_converted(self.name, found.report, found.leaves)
        if self._strict:
            check_strict(found.report)
        return self._run(found, args, kwargs, stored, product_key)

    def evaluate(
        self, *args: PyTree, stored: _Tree | None = None, product_key: jax.Array | None = None, **kwargs: PyTree
    ) -> PyTree:
        """Return the function's result even if nothing is converted: a method of a model may multiply nothing."""
        return self._run(self.examine(*args, **kwargs), args, kwargs, stored, product_key)

    def examine(self, *args: PyTree, **kwargs: PyTree) -> Examined:
        """Return the function's program and the decisions about it; nothing is computed.

        Raises:
          TypeError: the function has no such argument.
        """
        args = self._floats(args)
        program = trace(self.function, args, kwargs)
        leaves = {path: leaf for path, leaf in paths.leaves(args[self._params]).items() if is_array(leaf)}
        before, after = self._others(args, kwargs)
        # State that a model keeps next to its parameters, such as a running average, is not an input: its product with
        # a parameter makes another weight.
        state = len(arrays_in(args[self._params + 1])) if self._stateful else 0
        facts = [
            *(Fact(input=True) for _ in before),
            *(Fact(frozenset({path}), path, View.of(leaf.shape)) for path, leaf in leaves.items()),
            *(Fact(input=number >= state) for number in range(len(after))),
        ]
        return judge(program, census(program.jaxpr, facts), leaves, self.policy, self._prefix)

    def run_on(self, machine: Machine, found: Examined, args: _Args, probes: _Tree) -> list[jax.Array]:
        """Return the arrays of the result from another machine, whose products find `probes` as stored weights."""
        own = [Shown.of(leaf, probes.get(path), found.weights.get(path)) for path, leaf in found.leaves.items()]
        return self._outputs(machine, found, own, self._others(args, {}))

    def with_policy(self, chosen: Policy) -> "Transformed":
        """Return the same function with another policy."""
        return Transformed(
            self.function, chosen, self._params, strict=self._strict, name=self.name, prefix=self._prefix,
            stateful=self._stateful,
        )  # fmt: skip

    def _run(self, found: Examined, args: _Args, kwargs: _Tree, stored: _Tree | None, key: jax.Array | None) -> PyTree:
        trained = self._trained(args)
        kept = {path: replace(leaf, training=None) for path, leaf in trained.items()} | paths.entries(stored or {})
        absent = [path for path, leaf in found.leaves.items() if isinstance(leaf, SHAPES)]
        if kept or absent:
            check_state(kept, found.leaves, absent)
        own = []
        for path, leaf in found.leaves.items():
            dtype = training_of(trained[path]).gradient_dtype if path in trained else None
            rounded = path in found.rounded
            own.append(_parameter(leaf, kept.get(path), found.weights.get(path), dtype, rounded=rounded))
        outputs = self._outputs(Machine(), found, own, self._others(args, kwargs), key)
        return found.program.rebuild(outputs)

    def _outputs(
        self, machine: Machine, found: Examined, own: list[Shown], others: tuple[list[jax.Array], list[jax.Array]],
        key: jax.Array | None = None,
    ) -> list[jax.Array]:  # fmt: skip
        jaxpr, (before, after) = found.program.jaxpr, others
        outputs = machine.run((jaxpr.jaxpr, jaxpr.consts), [*before, *own, *after], found.plan, key)
        return bare(outputs, jaxpr.jaxpr.outvars)

    def _others(self, args: _Args, kwargs: _Tree) -> tuple[list[jax.Array], list[jax.Array]]:
        """Return the arrays of the arguments before and after the parameters, in the order of the program's inputs."""
        before = arrays_in(args[: self._params]) if self._params else []
        return before, arrays_in((args[self._params + 1 :], dict(kwargs)))

    def _trained(self, args: _Args) -> dict[str, Stored]:
        """Return the parameters that are stored weights themselves, by path."""
        leaves = paths.leaves(args[self._params], lambda node: isinstance(node, Stored))
        return {path: leaf for path, leaf in leaves.items() if isinstance(leaf, Stored)}

    def _floats(self, args: _Args) -> _Args:
        """Return the arguments with float parameters instead of stored ones.

        Code that is not a product reads the floats. A program without such code never computes them.
        """
        if self._params >= len(args):
            raise TypeError(
                f"params={self._params}, but the function was called with {len(args)} positional arguments; pass the "
                "parameters by position"
            )
        if not self._trained(args):
            return args
        params = args[self._params]
        floats = jax.tree.map(lambda leaf: kernel_of(leaf) if is_stored(leaf) else leaf, params, is_leaf=is_stored)
        return (*args[: self._params], floats, *args[self._params + 1 :])


def _parameter(
    leaf: Any, stored: PyTree, weight: Weight | None, gradient_dtype: DTypeLike | None, *, rounded: bool
) -> Shown:
    """Return a parameter as an input of the program, with its stored form if that fits."""
    if isinstance(stored, PackedTCFP12):
        if weight is not None and not isinstance(
            leaf, SHAPES
        ):  # a table: its floats are looked up, and its codes multiplied
            stored = _quantized(stored.dequantize(leaf.dtype), weight)
        else:
            leaf, stored = stored.dequantize(leaf.dtype), None
    if rounded:
        leaf = fake_quantize(leaf)
    if weight is None:
        return Shown.of(leaf, None, None, gradient_dtype)
    if stored is not None and not isinstance(leaf, SHAPES):
        # A stage of a pipeline has its part of a stack of layers, which may be a single layer: its axis has no view.
        extra = len(stored.stack)
        if len(weight.layout.matrix_shape(leaf.shape)) == 2 and stored.stack == (1,) * extra:
            stored = jax.tree.map(lambda array: array.reshape(array.shape[extra:]), stored)
        weight.layout.check(stored, leaf.shape)
        stored = current(stored, weight.layout.matrix(leaf))
    return Shown.of(leaf, stored, weight, gradient_dtype)


def _quantized(kernel: jax.Array, weight: Weight) -> Stored:
    """Return the stored form of a kernel that was packed."""
    key = jax.random.key(0) if weight.recipe.stochastic else None  # only evaluation comes here, and its calls repeat
    quantize = lambda w: quantize_weight(w, weight.recipe, key=key)[0]
    for _ in weight.layout.stack:
        quantize = jax.vmap(quantize)
    return quantize(weight.layout.matrix(kernel))


def transform(
    fn: Callable[..., PyTree],
    recipe: Recipe | str,
    *,
    params: int = 0,
    rules: Rules = None,
    include: Iterable[Include] | Include = ("linear",),
    strict: bool = False,
) -> Transformed:
    """Return `fn` with every product of a parameter and an input computed by `recipe`.

    Use it for a model that is a plain function. Like `jax.grad` and `jax.checkpoint` it takes and returns a function,
    and it composes with them, with `jax.jit`, `jax.vmap` and control flow, inside and outside. It follows parameters
    through reshapes, transposes, casts, slices and loops over stacks, so that the optimizer's stored weights fit and
    gradients go straight to the parameters.

    Args:
      fn: any function of arrays. It is traced, as `jax.jit` traces.
      recipe: a `Recipe` or the name of one.
      params: the positional argument that holds the parameters.
      rules: pairs of a regex and a recipe (None: leave it alone), as a mapping or a sequence; the regex is searched in
        the parameter's path ("block_0/mlp/kernel"), its layer's path and the named scope of the product. Or functions
        `(path, product)` to a recipe, or None for no opinion. The first match wins, also over `include`.
      include: products that take `recipe` without a rule: "linear"; "head", the product that makes the model's output;
        "small", matrices with a side below 1024, which are slower than in BF16; "measured", products of "linear" (and
        of "head", if named) that measured times on this device say to be faster than BF16, at each call's own rows and
        at any size; a shape, recipe or device that was not timed goes by size. Also parameters to round to the packed
        format: "layer_norm", gains and their biases, and "embed", rows that are looked up.
      strict: raise if a product of a parameter has no low-precision form and no rule leaves it alone, or if a rule
        matches nothing.

    Raises:
      TypeError: `fn` is not a function.
      ValueError: an unknown recipe or group, or a rule that is not a regex.

    >>> low = transform(lambda params, x: x @ params["w"], "tensorwise", include=("linear", "small"))
    >>> low({"w": jax.numpy.ones((4, 2))}, jax.numpy.ones((3, 4)))[0].tolist()
    [4.0, 4.0]
    """
    if isinstance(fn, nn.Module | nnx.Module):
        raise TypeError(
            f"fn is the module {type(fn).__name__}; use convert_to_tcfp(model, recipe, *inputs), or pass a function of "
            "parameters and inputs, such as lambda params, x: model.apply({'params': params}, x)"
        )
    if not callable(fn):
        raise TypeError(f"fn is a {type(fn).__name__}; pass a function of parameters and inputs")
    return Transformed(fn, policy(recipe, rules, include), params, strict=strict)
