"""`transform(fn, recipe)`: a JAX function with the products of its parameters in low precision, whoever wrote it.

    low = transform(apply, "tcfp12_fast")                                       # apply(params, x)
    tx = optax.chain(optax.adamw(3e-4), error_feedback(find_weights(low, params, x)))
    loss = lambda params, stored: jnp.mean(low(params, x, stored=stored) ** 2)  # stored: layer_state(opt_state)

The function is traced, the census finds its products, the policy chooses their recipes, and the program is evaluated
again with the chosen ones. Layer types are never looked at, nothing of JAX is patched, and no cache of another function
can be reached: what is evaluated is the program of this one call.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from tcfp_jax import paths
from tcfp_jax.conversion.census import Census, Fact, Place, Product, census
from tcfp_jax.conversion.evaluation import Machine, Plan, Shown, bare, plan_of
from tcfp_jax.conversion.policy import Choice, Include, Policy, policy, rule_name
from tcfp_jax.conversion.report import Record, Report
from tcfp_jax.conversion.views import View
from tcfp_jax.layers import Absent
from tcfp_jax.products.contraction import matrix_of
from tcfp_jax.weights.freshness import current
from tcfp_jax.weights.layout import Weight, check_fits
from tcfp_jax.weights.packed import PackedTCFP12, fake_quantize


@dataclass(frozen=True)
class Examined:
    """A traced function: its program, and what is to be done with it.

    Attributes:
      jaxpr: the closed jaxpr of its arrays.
      out: its result: shapes, and what is not an array.
      census: of the program.
      leaves: the parameters, by path.
      prefix: of their paths, where a part of a model is called by itself.
      plan: for the evaluation.
      report: of its products.
      weights: those that `error_feedback` can store, by path.
      rounded: parameters to round to the packed format as they come in.
    """

    jaxpr: Any
    out: "Result"
    census: Census
    leaves: Mapping[str, Any]
    prefix: str
    plan: Plan
    report: Report
    weights: dict[str, Weight]
    rounded: frozenset[str]

    def by(self, chosen: Policy) -> "Examined":
        """The same program by another policy."""
        return _judge(self.jaxpr, self.out, self.census, self.leaves, chosen, self.prefix)


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

    def __call__(self, *args: Any, stored: Mapping[str, Any] | None = None, **kwargs: Any) -> Any:
        """The function's result.

        Args:
          args: of the function. Parameters that exist in quantized form alone are `jax.ShapeDtypeStruct`s.
          stored: what `layer_state` or `quantize_params` made of the parameters, by path; the others are quantized
            at each use.
          kwargs: of the function.

        Raises:
          ValueError: nothing can be converted, with `strict` something cannot, or `stored` is of other parameters.
        """
        found = self.examine(*args, **kwargs)
        if not found.report.converted and self.policy.recipe is not None and not self.policy.off:
            raise nothing_converted(self.name, found.report, self._leaves(args))
        if self._strict:
            check_strict(found.report)
        return self._run(found, args, kwargs, stored or {})

    def evaluate(self, *args: Any, stored: Mapping[str, Any] | None = None, **kwargs: Any) -> Any:
        """The function's result where it need not convert anything: a method of a model may multiply nothing."""
        return self._run(self.examine(*args, **kwargs), args, kwargs, stored or {})

    def _run(self, found: Examined, args: Any, kwargs: Any, stored: Mapping[str, Any]) -> Any:
        inputs = self._inputs(found, args, kwargs, paths.entries(stored))
        outputs = Machine().run(found.jaxpr.jaxpr, found.jaxpr.consts, inputs, found.plan)
        return found.out.rebuild(bare(outputs, found.jaxpr.jaxpr))

    def examine(self, *args: Any, **kwargs: Any) -> Examined:
        """What the function's program is, and what is to be done with it; nothing is computed.

        Raises:
          TypeError: the function has no such argument.
        """
        if self._params >= len(args):
            raise TypeError(
                f"params={self._params}, but the function was called with {len(args)} positional arguments; pass the "
                "parameters by position"
            )
        arrays, rebuild = arrays_of((args, kwargs))
        # A new function each time: its trace is in no cache, so that it cannot be stale.
        jaxpr, out = jax.make_jaxpr(_on_arrays(self.function, rebuild), return_shape=True)(arrays)
        found = census(jaxpr, self._facts(args, kwargs))
        return _judge(jaxpr, out, found, self._leaves(args), self.policy, self._prefix)

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

    def _leaves(self, args: Any) -> dict[str, Any]:
        """The parameters by path."""
        return {path: leaf for path, leaf in paths.leaves(args[self._params]).items() if _is_array(leaf)}

    def _facts(self, args: Any, kwargs: Any) -> list[Fact]:
        facts = []
        for place, arg in enumerate(args):
            for path, leaf in paths.leaves(arg).items() if place == self._params else ():
                if _is_array(leaf):
                    facts.append(Fact(frozenset({path}), path, View.of(leaf.shape)))
            if place != self._params:
                # What a model keeps beside its parameters, such as a running average, is no input: a product of it
                # and a parameter makes another weight.
                facts += [Fact(input=place != self._state) for leaf in jax.tree.leaves(arg) if _is_array(leaf)]
        return facts + [Fact(input=True) for leaf in jax.tree.leaves(kwargs) if _is_array(leaf)]

    def _inputs(self, found: Examined, args: Any, kwargs: Any, stored: Mapping[str, Any]) -> list[Any]:
        """The arrays of a call, those of parameters as views."""
        inputs: list[Any] = []
        leaves = self._leaves(args)
        check_state(stored, leaves)
        for place, arg in enumerate(args):
            if place != self._params:
                inputs += [leaf for leaf in jax.tree.leaves(arg) if _is_array(leaf)]
                continue
            for path, leaf in leaves.items():
                kept, weight = stored.get(path), found.weights.get(path)
                if isinstance(kept, PackedTCFP12):
                    leaf, kept = kept.dequantize(leaf.dtype), None
                if path in found.rounded:
                    leaf = fake_quantize(leaf)
                kept = None if weight is None else kept
                if kept is not None and _has_values(leaf):
                    check_fits(kept, weight.layout, leaf.shape)
                    kept = current(kept, matrix_of(leaf, weight.layout))
                inputs.append(Shown.of(leaf, kept, weight))
        return inputs + [leaf for leaf in jax.tree.leaves(kwargs) if _is_array(leaf)]


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
        matrices below 1024 x 1024 or with a side below 512, which are slower than in BF16; and parameters that are
        rounded to the packed format: "layer_norm", gains and their biases, and "embed", rows that are looked up.
      strict: raise where a product of a parameter has no low-precision form, and no rule leaves it alone, or where a
        rule matches nothing.

    Raises:
      TypeError: `fn` is not a function.
      ValueError: an unknown recipe or group, or a rule that is not a regex.

    >>> low = transform(lambda params, x: x @ params["w"], "tensorwise", include=("linear", "small"))
    >>> low({"w": jnp.ones((4, 2))}, jnp.ones((3, 4)))[0].tolist()
    [4.0, 4.0]
    """
    if not callable(fn):
        raise TypeError(f"fn is a {type(fn).__name__}; pass a function of parameters and inputs")
    return Transformed(fn, policy(recipe, rules, include), params, strict=strict)


def _judge(
    jaxpr: Any, out: "Result", found: Census, leaves: Mapping[str, Any], chosen: Policy, prefix: str
) -> Examined:
    # Rules know a parameter by its path in the whole model, also where a part of the model is called by itself.
    named = {place: dataclasses.replace(p, path=paths.join(prefix, p.path)) for place, p in found.products.items()}
    choices = {place: chosen.choose(product) for place, product in named.items()}
    on = chosen.switched(())  # what is switched off keeps its state
    weights = _weights(found, {place: on.choose(product).recipe for place, product in named.items()})
    records = [
        Record(product, choices[place], _serves(weights.get(product.path), choices[place], product))
        for place, product in found.products.items()
    ]  # fmt: skip
    steps: dict[Place, Any] = {
        place: choice.recipe
        for place, choice in choices.items()
        if choice.recipe is not None and found.products[place].recipe is None
    }
    lookups = {place: path for place, path in found.lookups.items() if "embed" in chosen.include}
    steps |= dict.fromkeys(lookups, "packed")
    gains = _gains(found, leaves) if "layer_norm" in chosen.include else frozenset()
    matched = {choice.rule for choice in choices.values()}
    unmatched = tuple(rule_name(rule) for number, rule in enumerate(chosen.rules) if number not in matched)
    report = Report(
        tuple(record for record in records if record.recipe is not None),
        tuple(record for record in records if record.recipe is None),
        unmatched, tuple(sorted({*lookups.values(), *gains})),
    )  # fmt: skip
    return Examined(jaxpr, out, found, leaves, prefix, plan_of(steps), report, weights, gains)


def _serves(weight: Weight | None, choice: Choice, product: Product) -> bool:
    """Whether a product reads the weight as it is stored."""
    return weight is not None and (weight.recipe, weight.layout) == (choice.recipe, product.layout)


def _weights(found: Census, recipes: Mapping[Place, Any]) -> dict[str, Weight]:
    """How each parameter is stored: as its first converted product reads it."""
    weights: dict[str, Weight] = {}
    # Products that stay float read the float weight, too.
    float_reads = {path for path, kinds in found.reads.items() if kinds}
    float_reads |= {product.path for place, product in found.products.items() if recipes[place] is None}
    for place, product in found.products.items():
        recipe = recipes[place]
        if recipe is not None and recipe.weight is not None and product.layout is not None:
            reads = "lookup" if product.path in float_reads else "none"
            weights.setdefault(product.path, Weight(recipe, product.layout, reads))
    return weights


def _gains(found: Census, leaves: Mapping[str, Any]) -> frozenset[str]:
    """Vectors that multiply an input, and vectors of the same layer that are added to one."""
    vectors = {path for path, leaf in leaves.items() if len(leaf.shape) == 1}
    gains = {path for path in vectors if "mul" in found.reads.get(path, ())}
    layers = {path.rpartition("/")[0] for path in gains}
    return frozenset(gains | {path for path in vectors if path.rpartition("/")[0] in layers and "/" in path})


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
    missing = [path for path, leaf in leaves.items() if path not in stored and not _has_values(leaf)]
    if missing:
        raise ValueError(
            f"{missing[0]!r} is a shape without values, and the state does not hold it; pass the parameter"
        )


def check_strict(report: Report) -> None:
    """Raise where something was left alone that no rule names.

    Raises:
      ValueError: names the products, or the rules that match nothing.
    """
    if report.impossible:
        lines = "; ".join(f"{record.product}: {record.reason}" for record in report.impossible[:5])
        raise ValueError(
            f"strict=True: {len(report.impossible)} products of parameters have no low-precision form: {lines}; leave "
            'them alone by rules, such as {"patch": None}'
        )
    if report.unmatched_rules:
        raise ValueError(f"strict=True: no product matches the rule {report.unmatched_rules[0]}; survey lists them")


def nothing_converted(name: str, report: Report, leaves: Mapping[str, Any]) -> ValueError:
    """The error of a conversion that would change nothing."""
    if not report.skipped:
        shapes = {path: list(leaf.shape) for path, leaf in leaves.items()}
        seen = ", ".join(f"{path} {shape}" for path, shape in list(shapes.items())[:8])
        return ValueError(
            f"no product of {name} was converted: its program multiplies none of its parameters by an input; the "
            f"parameters are {seen or 'none'}{f' and {len(shapes) - 8} more' if len(shapes) > 8 else ''}; pass those "
            "that are multiplied, and inputs that reach them"
        )
    lines = [
        f"{record.product.path or '(root)'} {list(record.product.shape)}: {record.reason}" for record in report.skipped
    ]
    return ValueError(
        f"no product of {name} was converted: {'; '.join(lines[:5])}"
        f"{f' and {len(lines) - 5} more' if len(lines) > 5 else ''}; name them in rules or widen include"
    )


def arrays_of(tree: Any) -> tuple[list[Any], Any]:
    """(arrays of a tree, a function that puts arrays back): what is not an array stays a Python value when traced."""
    treedef: Any
    leaves, treedef = jax.tree.flatten(tree)
    arrays = [_is_array(leaf) for leaf in leaves]
    others = [None if array else leaf for array, leaf in zip(arrays, leaves, strict=True)]

    def rebuild(found: list[Any]) -> Any:
        rest = iter(found)
        return treedef.unflatten([next(rest) if array else leaf for array, leaf in zip(arrays, others, strict=True)])

    return [_abstract(leaf) for array, leaf in zip(arrays, leaves, strict=True) if array], rebuild


def _abstract(leaf: Any) -> Any:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if isinstance(leaf, Absent) else leaf


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def _has_values(leaf: Any) -> bool:
    return not isinstance(leaf, jax.ShapeDtypeStruct | Absent)


@jax.tree_util.register_pytree_node_class
class Result:
    """What a function returned: its arrays, and beside them what is not an array and stays a Python value."""

    def __init__(self, arrays: list[Any], rebuild: Any) -> None:
        self.arrays, self.rebuild = arrays, rebuild

    def tree_flatten(self) -> Any:
        """Arrays are the children; the rest is compared by identity."""
        return self.arrays, self.rebuild

    @classmethod
    def tree_unflatten(cls, rebuild: Any, arrays: Any) -> "Result":
        """The same with other arrays."""
        return cls(list(arrays), rebuild)


def _on_arrays(fn: Callable[..., Any], rebuild: Any) -> Callable[[Any], Result]:
    def run(arrays: Any) -> Result:
        args, kwargs = rebuild(arrays)
        return Result(*arrays_of(fn(*args, **kwargs)))

    return run


def _some(names: Iterable[str]) -> str:
    listed = sorted(names)
    return ", ".join(listed[:8]) + (f" and {len(listed) - 8} more" if len(listed) > 8 else "")
