"""`transform(fn, recipe)`: a JAX function with the products of its parameters in low precision, whoever wrote it.

    low = transform(apply, "tcfp12_fast")                                       # apply(params, x)
    tx = optax.chain(optax.adamw(3e-4), error_feedback(find_weights(low, params, x)))
    loss = lambda params, stored: jnp.mean(low(params, x, stored=stored) ** 2)  # stored: layer_state(opt_state)

The function is traced, the census finds its products, the policy chooses their recipes, and the program is evaluated
again with the chosen ones. Layer types are never looked at, nothing of JAX is patched, and no cache of another function
can be reached: what is evaluated is the program of this one call.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
from flax import linen as nn
from flax import nnx

from tcfp_jax import paths
from tcfp_jax.conversion.arrays import arrays_of, has_values, is_array, on_arrays
from tcfp_jax.conversion.census import census
from tcfp_jax.conversion.evaluation import Machine, bare
from tcfp_jax.conversion.examination import Examined, judge
from tcfp_jax.conversion.facts import Fact
from tcfp_jax.conversion.policy import Include, Policy, policy
from tcfp_jax.conversion.report import check_strict, nothing_converted
from tcfp_jax.conversion.shown import Shown
from tcfp_jax.conversion.views import View
from tcfp_jax.products.contraction import matrix_of
from tcfp_jax.weights.freshness import current
from tcfp_jax.weights.layout import Weight, check_fits
from tcfp_jax.weights.packed import PackedTCFP12, fake_quantize
from tcfp_jax.weights.quantization import quantize_weight
from tcfp_jax.weights.stored import Stored
from tcfp_jax.weights.training import is_stored, kernel_of, training_of, values_of


class Transformed:
    """A function as `transform` returns it: call it as the function itself.

    Attributes:
      function: the one that was transformed.
      policy: what it was asked for.
      name: for messages.
    """

    def __init__(
        self, function: Callable[..., Any], chosen: Policy, params: int, *, strict: bool = False, name: str = "",
        prefix: str = "", state: int | None = None,
    ) -> None:  # fmt: skip
        functools.update_wrapper(self, function, updated=())
        self.name = name or getattr(function, "__name__", type(function).__name__)
        self.function, self.policy, self._params, self._strict = function, chosen, params, strict
        self._prefix, self._state = prefix, state

    def __call__(
        self, *args: Any, stored: Mapping[str, Any] | None = None, product_key: jax.Array | None = None, **kwargs: Any
    ) -> Any:
        """The function's result.

        Args:
          args: of the function. Parameters may be what `tcfp_jax.store` made of them; those that exist in quantized
            form alone beside `stored` are `jax.ShapeDtypeStruct`s.
          stored: what `layer_state` or `quantize_params` made of the parameters, by path; the others are quantized
            at each use.
          product_key: of FP4 training's random bits; another at each step.
          kwargs: of the function.

        Raises:
          ValueError: nothing can be converted, with `strict` something cannot, or `stored` is of other parameters.
        """
        found = self.examine(*args, **kwargs)
        left = not found.report.converted and not found.report.weighed
        if left and self.policy.recipe is not None and not self.policy.off:
            raise nothing_converted(self.name, found.report, self._leaves(self._floats(args)[0]))
        if self._strict:
            check_strict(found.report)
        return self._run(found, args, kwargs, stored, product_key)

    def evaluate(
        self, *args: Any, stored: Mapping[str, Any] | None = None, product_key: jax.Array | None = None, **kwargs: Any
    ) -> Any:
        """The function's result where it need not convert anything: a method of a model may multiply nothing."""
        return self._run(self.examine(*args, **kwargs), args, kwargs, stored, product_key)

    def _run(
        self, found: Examined, args: Any, kwargs: Any, stored: Mapping[str, Any] | None, key: jax.Array | None
    ) -> Any:
        dtypes = {
            path: training_of(leaf).gradient_dtype
            for path, leaf in paths.leaves(args[self._params], is_stored).items()
            if is_stored(leaf)
        }
        args, own = self._floats(args)
        inputs = self._inputs(found, args, kwargs, {**own, **paths.entries(stored or {})}, dtypes)
        outputs = Machine().run(found.jaxpr.jaxpr, found.jaxpr.consts, inputs, found.plan, key)
        return found.out.rebuild(bare(outputs, found.jaxpr.jaxpr))

    def run_on(self, machine: Machine, found: Examined, args: Any, beside: Mapping[str, Any]) -> list[Any]:
        """The arrays of the function's result from a machine of one's own, whose products find `beside` by path."""
        args, _ = self._floats(args)
        inputs: list[Any] = []
        for place, arg in enumerate(args):
            if place == self._params:
                leaves = self._leaves(args).items()
                inputs += [Shown.of(leaf, beside.get(path), found.weights.get(path)) for path, leaf in leaves]
            else:
                inputs += [leaf for leaf in jax.tree.leaves(arg) if is_array(leaf)]
        return bare(machine.run(found.jaxpr.jaxpr, found.jaxpr.consts, inputs, found.plan), found.jaxpr.jaxpr)

    def examine(self, *args: Any, **kwargs: Any) -> Examined:
        """What the function's program is, and what is to be done with it; nothing is computed.

        Raises:
          TypeError: the function has no such argument.
        """
        args, _ = self._floats(args)
        arrays, rebuild = arrays_of((args, kwargs))
        # A new function each time: its trace is in no cache, so that it cannot be stale.
        jaxpr, out = jax.make_jaxpr(on_arrays(self.function, rebuild), return_shape=True)(arrays)
        found = census(jaxpr, self._facts(args, kwargs))
        return judge(jaxpr, out, found, self._leaves(args), self.policy, self._prefix)

    def with_policy(self, chosen: Policy) -> "Transformed":
        """The same function by another policy."""
        return Transformed(
            self.function,
            chosen,
            self._params,
            strict=self._strict,
            name=self.name,
            prefix=self._prefix,
            state=self._state,
        )

    def _floats(self, args: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Stored]]:
        """(the arguments with float parameters in the place of stored ones, what products read of these, by path).

        The floats are what code reads that is no product; a program in which there is none never computes them.
        """
        if self._params >= len(args):
            raise TypeError(
                f"params={self._params}, but the function was called with {len(args)} positional arguments; pass the "
                "parameters by position"
            )
        params = args[self._params]
        found = {path: leaf for path, leaf in paths.leaves(params, is_stored).items() if isinstance(leaf, Stored)}
        if not found:
            return args, {}
        floats = jax.tree.map(lambda leaf: kernel_of(leaf) if is_stored(leaf) else leaf, params, is_leaf=is_stored)
        own = {path: values_of(leaf) for path, leaf in found.items()}
        return (*args[: self._params], floats, *args[self._params + 1 :]), own

    def _leaves(self, args: Any) -> dict[str, Any]:
        """The parameters by path."""
        return {path: leaf for path, leaf in paths.leaves(args[self._params]).items() if is_array(leaf)}

    def _facts(self, args: Any, kwargs: Any) -> list[Fact]:
        facts = []
        for place, arg in enumerate(args):
            for path, leaf in paths.leaves(arg).items() if place == self._params else ():
                if is_array(leaf):
                    facts.append(Fact(frozenset({path}), path, View.of(leaf.shape)))
            if place != self._params:
                # What a model keeps beside its parameters, such as a running average, is no input: a product of it
                # and a parameter makes another weight.
                facts += [Fact(input=place != self._state) for leaf in jax.tree.leaves(arg) if is_array(leaf)]
        return facts + [Fact(input=True) for leaf in jax.tree.leaves(kwargs) if is_array(leaf)]

    def _inputs(
        self,
        found: Examined,
        args: Any,
        kwargs: Any,
        stored: Mapping[str, Any],
        dtypes: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """The arrays of a call, those of parameters as views, with gradients of other dtypes than their own."""
        inputs: list[Any] = []
        leaves = self._leaves(args)
        check_state(stored, leaves)
        dtypes = dtypes or {}
        for place, arg in enumerate(args):
            if place != self._params:
                inputs += [leaf for leaf in jax.tree.leaves(arg) if is_array(leaf)]
                continue
            for path, leaf in leaves.items():
                kept, weight = stored.get(path), found.weights.get(path)
                if isinstance(kept, PackedTCFP12):
                    if weight is not None and has_values(leaf):  # a table: its floats are looked up, not multiplied
                        kept = _quantized(kept.dequantize(leaf.dtype), weight)
                    else:
                        leaf, kept = kept.dequantize(leaf.dtype), None
                if path in found.rounded:
                    leaf = fake_quantize(leaf)
                kept = None if weight is None else kept
                if kept is not None and weight is not None and has_values(leaf):
                    kept = _without_a_stack_of_one(kept, len(weight.layout.matrix_shape(leaf.shape)))
                    check_fits(kept, weight.layout, leaf.shape)
                    kept = current(kept, matrix_of(leaf, weight.layout))
                inputs.append(Shown.of(leaf, kept, weight, dtypes.get(path)))
        return inputs + [leaf for leaf in jax.tree.leaves(kwargs) if is_array(leaf)]


def transform(
    fn: Callable[..., Any],
    recipe: Any,
    *,
    params: int = 0,
    rules: Any = None,
    include: Iterable[Include] | Include = ("linear",),
    strict: bool = False,
) -> Transformed:
    """`fn` with every product of a parameter and an input computed as `recipe` says.

    Like `jax.grad` and `jax.checkpoint` it takes and returns a function, and it composes with them, with `jax.jit`,
    `jax.vmap` and control flow, inside and outside. Parameters are followed through reshapes, transposes, casts, slices
    and loops over stacks, so that the optimizer's stored weights fit and gradients go straight to them.

    Args:
      fn: any function of arrays. It is traced, as `jax.jit` traces.
      recipe: a `Recipe` or the name of one.
      params: the positional argument that holds the parameters.
      rules: pairs of a regex and a recipe (None: leave it alone), as a mapping or a sequence; the regex is searched in
        the parameter's path ("block_0/mlp/kernel"), its layer's path and the named scope of the product. Or functions
        `(path, product)` to a recipe, or None where they have no opinion. The first match wins, also over `include`.
      include: products that take `recipe` without a rule: "linear"; "head", what makes the model's output; "small",
        matrices with a side below 1024, which are slower than in BF16; "measured", those of "linear" (and "head", if
        it is there, too) that measured times say to be faster than BF16 on this device, at each call's own rows, be
        they small or not; a shape, recipe or device that was not timed goes by size. And parameters that are rounded
        to the packed format: "layer_norm", gains and their biases, and "embed", rows that are looked up.
      strict: raise where a product of a parameter has no low-precision form, and no rule leaves it alone, or where a
        rule matches nothing.

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


def _without_a_stack_of_one(stored: Stored, ndim: int) -> Stored:
    """The one matrix of a stack of one, where a matrix is meant: a loop over one layer has an axis that is nobody's.

    A stage of a pipeline has its part of a stack, which may be a single layer.
    """
    extra = len(stored.stack)
    if ndim != 2 or stored.stack != (1,) * extra:
        return stored
    return jax.tree.map(lambda leaf: leaf.reshape(leaf.shape[extra:]), stored)


def _quantized(kernel: jax.Array, weight: Weight) -> Stored:
    """The stored form of a kernel that was packed."""
    key = jax.random.key(0) if weight.recipe.stochastic else None  # in evaluation: calls repeat
    quantize = lambda w: quantize_weight(w, weight.recipe, key=key)[0]
    for _ in weight.layout.stack:
        quantize = jax.vmap(quantize)
    return quantize(matrix_of(kernel, weight.layout))


def check_state(stored: Mapping[str, Any], leaves: Mapping[str, Any]) -> None:
    """Raise unless the state is of these parameters, and no parameter is missing in both.

    Raises:
      ValueError: a stored weight without a parameter, or a shape without a stored weight.
    """
    unknown = sorted(set(stored) - set(leaves))
    if unknown:
        raise ValueError(
            f"the state holds {unknown[0]!r}, but the parameters have only {_some(leaves)}; pass the state of these "
            "parameters"
        )
    missing = [path for path, leaf in leaves.items() if path not in stored and not has_values(leaf)]
    if missing:
        raise ValueError(
            f"{missing[0]!r} is a shape without values, and the state does not hold it; pass the parameter"
        )


def _some(names: Iterable[str]) -> str:
    listed = sorted(names)
    return ", ".join(listed[:8]) + (f" and {len(listed) - 8} more" if len(listed) > 8 else "")
