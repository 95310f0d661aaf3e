"""`transform(fn, recipe)`: a JAX function with its products in low precision.

    low = transform(apply, "tcfp12_fast")  # apply(params, x)
    tx = optax.chain(optax.adamw(3e-4), error_feedback(find_weights(low, params, x)))

    def loss(params, opt_state, x):
        return jnp.mean(low(params, x, stored=layer_state(opt_state)) ** 2)

A call traces the function, the census finds its products, the policy chooses their
recipes, and the evaluation runs the program again with them. No step looks at types of
layers, and nothing of JAX is patched. Each call evaluates its own program, so it cannot
meet the cache of another function.

Left out: convolutions, products of two activations, such as attention scores, and
products inside a function with a derivative of its own. They run as they were written;
a rule `(regex, "inline")` opens such a function. `transform` makes no gradient:
differentiate its result. For a Flax model use `convert_to_tcfp`, which keeps the
model's methods and state.
"""

import functools
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from flax import linen as nn
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from tcfp_jax import paths
from tcfp_jax.conversion.evaluate import Machine
from tcfp_jax.conversion.facts import Fact
from tcfp_jax.conversion.policy import Include, Policy, Rules, policy
from tcfp_jax.conversion.report import Examined, Program, Traced
from tcfp_jax.conversion.shown import SHAPES, Shown
from tcfp_jax.conversion.views import View
from tcfp_jax.layers import Absent
from tcfp_jax.paths import Args, Function, PyTree, Tree
from tcfp_jax.products.matmul import forward_mode_explained
from tcfp_jax.recipes import Recipe
from tcfp_jax.weights.deferred import Deferred
from tcfp_jax.weights.freshness import current
from tcfp_jax.weights.layout import Weight
from tcfp_jax.weights.parameter import Parameter, is_quantized, parameter_of
from tcfp_jax.weights.quantization import quantize_weight
from tcfp_jax.weights.stored import Stored
from tcfp_jax.weights.tcfp12 import PackedTCFP12, fake_quantize

_Rebuild = Callable[[Sequence[Array | jax.ShapeDtypeStruct]], PyTree]


# Conversions (of Linen) and policies (of NNX) whose weights `find_weights` gave out, to
# be kept in an optimizer, and that no optimizer has given back yet.
AWAITED: set[object] = set()


def trace(function: Function, args: Args, kwargs: Tree) -> Program:
    """Trace a function of arrays and other values, such as strings and modules.

    Its result may hold such values, too.

    >>> def apply(x, how):
    ...     return x + 1, how
    >>> program = trace(apply, (jax.numpy.ones(2), "up"), {})
    >>> program.rebuild(["the sum"])
    ('the sum', 'up')
    """
    arrays, rebuild_arguments = _split((args, dict(kwargs)))
    rebuild: _Rebuild = list

    # A new function for every call: no cache holds a trace of it, so none can be stale.
    def run(arrays: list[Array]) -> list[Array]:
        nonlocal rebuild
        args, kwargs = rebuild_arguments(arrays)
        outputs, rebuild = _split(function(*args, **kwargs))
        return outputs

    jaxpr, outputs = jax.make_jaxpr(run, return_shape=True)(arrays)
    return Program(jaxpr, outputs, rebuild)


def _split(tree: PyTree) -> tuple[list[Array], _Rebuild]:
    """Return the arrays of a tree, and the function that replaces them by others."""
    treedef: Any
    leaves, treedef = jax.tree.flatten(tree)
    places = [place for place, leaf in enumerate(leaves) if _is_array(leaf)]
    arrays = []
    for place in places:
        leaf = leaves[place]
        if isinstance(leaf, Absent):  # make_jaxpr knows shapes by JAX's own class only
            leaf = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        arrays.append(leaf)
        leaves[place] = None

    def rebuild(arrays: Sequence[Array | jax.ShapeDtypeStruct]) -> PyTree:
        filled = list(leaves)
        for place, array in zip(places, arrays, strict=True):
            filled[place] = array
        return treedef.unflatten(filled)

    return arrays, rebuild


def arrays_in(tree: PyTree) -> list[Array]:
    """Return the arrays of a tree, in the order of the inputs of a `Program`."""
    return [leaf for leaf in jax.tree.leaves(tree) if _is_array(leaf)]


def _is_array(leaf: object) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def warn_if_forgotten(
    conversion: object, params: PyTree, kind: str, repair: str
) -> None:
    """Say once that a model is trained without its optimizer's stored weights.

    A leaf that is a tracer of a derivative is the one sign of training that a call can
    see.
    """
    if conversion not in AWAITED:
        return
    leaves = jax.tree.leaves(params, is_leaf=is_quantized)
    kinds = {type(leaf).__name__ for leaf in leaves}
    is_trained = not kinds.isdisjoint(("JVPTracer", "LinearizeTracer"))
    if any(map(is_quantized, leaves)) or is_trained:
        AWAITED.discard(conversion)
    if is_trained and not any(map(is_quantized, leaves)):
        warnings.warn(
            f"a converted {kind} model is trained without its optimizer's stored"
            f" weights: find_weights was called, {repair}",
            stacklevel=4,
        )


@dataclass(eq=False, repr=False)
class Transformed:
    """A function from `transform`. Call it as the function itself.

    Use this type to pass the function to `survey`, `find_weights`, `to_bf16` and
    `export`.

    Attributes:
      function: the function that was transformed.
      policy: the request.
      params: number of the argument that holds the parameters.
      strict: whether a call raises if a product has no low-precision form.
      name: name of the function in messages.
      prefix: path of the function's part of a model.
      stateful: whether the next argument is other state, such as running averages.
      must: whether a call raises if nothing is converted; a method of a model may
        multiply nothing.
    """

    function: Function
    policy: Policy
    params: int
    strict: bool = False
    name: str = ""
    prefix: str = ""
    stateful: bool = False
    must: bool = True

    def __post_init__(self) -> None:
        functools.update_wrapper(self, self.function, updated=())
        self.name = self.name or getattr(
            self.function, "__name__", type(self.function).__name__
        )

    def __call__(
        self,
        *args: PyTree,
        stored: Tree | None = None,
        product_key: Array | None = None,
        **kwargs: PyTree,
    ) -> PyTree:
        """Return the function's result.

        Args:
          args: arguments of the function. Parameters may be stored; one only in
            `stored` is a `jax.ShapeDtypeStruct`.
          stored: `layer_state` or `quantize_params` of the parameters; others are
            quantized at each use.
          product_key: key of FP4 training's random bits; pass another one at each step.
          kwargs: keyword arguments of the function.

        Raises:
          ValueError: nothing can be converted, with `strict` something cannot, or
            `stored` belongs to other parameters.
        """
        found = self.examine(*args, **kwargs)
        if self.must and self.policy.recipe is not None and not self.policy.off:
            found.check_converted(self.name)
        if self.strict:
            found.report.check_strict()
        with forward_mode_explained(f"{self.name}, which is converted"):
            return self._run(found, args, kwargs, stored, product_key)

    def examine(self, *args: PyTree, **kwargs: PyTree) -> Examined:
        """Return the function's program and the decisions about it.

        Nothing is computed.
        """
        args = self._floats(args)
        program = trace(self.function, args, kwargs)
        leaves = {}
        for path, leaf in paths.leaves(args[self.params]).items():
            if _is_array(leaf):
                leaves[path] = leaf
        before, after = self._others(args, kwargs)
        # A model's other state, such as a running average, is not an input: its
        # product with a parameter is another weight.
        state = len(arrays_in(args[self.params + 1])) if self.stateful else 0
        facts = [Fact(input=True)] * len(before)
        for path, leaf in leaves.items():
            facts.append(Fact(frozenset({path}), path, View.of(leaf.shape)))
        facts += [Fact(input=number >= state) for number in range(len(after))]
        traced = Traced(program, facts, leaves, self.prefix)
        return traced.examined(self.policy)

    def run_on(
        self, machine: Machine, found: Examined, args: Args, probes: Tree
    ) -> list[Array]:
        """Return the arrays of the result from another machine.

        Its products find `probes` as stored weights.
        """
        own = []
        for path, leaf in found.leaves.items():
            weight = found.weights.get(path)
            own.append(Shown.of(leaf, probes.get(path), weight))
        return self._outputs(machine, found, own, args, {})

    def _run(
        self,
        found: Examined,
        args: Args,
        kwargs: Tree,
        stored: Tree | None,
        key: Array | None,
    ) -> PyTree:
        leaves = paths.leaves(args[self.params], is_quantized)
        trained = {
            path: leaf for path, leaf in leaves.items() if isinstance(leaf, Parameter)
        }
        state = paths.entries(stored) if stored else {}
        twice = sorted(set(trained) & set(state))
        if twice:
            raise ValueError(
                f"{twice[0]!r} is a stored parameter, and the optimizer keeps a copy of"
                " the float one before it; call tcfp_jax.store first, and make the"
                " optimizer of the stored parameters"
            )
        kept = {path: _as_read(leaf) for path, leaf in trained.items()} | state
        _check_state(kept, found.leaves)
        own = []
        for path, leaf in found.leaves.items():
            weight = found.weights.get(path)
            dtype = None
            if path in trained:
                dtype = trained[path].described.gradient_dtype
            rounded = path in found.rounded
            own.append(_parameter(leaf, kept.get(path), weight, dtype, rounded=rounded))
        outputs = self._outputs(Machine(), found, own, args, kwargs, key)
        return found.program.rebuild(outputs)

    def _outputs(
        self,
        machine: Machine,
        found: Examined,
        own: list[Shown],
        args: Args,
        kwargs: Tree,
        key: Array | None = None,
    ) -> list[Array]:
        program = found.program.jaxpr
        before, after = self._others(args, kwargs)
        body = (program.jaxpr, program.consts)
        return machine.arrays(body, [*before, *own, *after], found.plan, key)

    def _others(self, args: Args, kwargs: Tree) -> tuple[list[Array], list[Array]]:
        """Return the arrays before and after the parameters, in the program's order."""
        rest = (args[self.params + 1 :], dict(kwargs))
        return arrays_in(args[: self.params]), arrays_in(rest)

    def _floats(self, args: Args) -> Args:
        """Return the arguments with float parameters instead of stored ones.

        Code that is not a product reads the floats. A program without such code never
        computes them.
        """
        if self.params >= len(args):
            raise TypeError(
                f"params={self.params}, but the function was called with {len(args)}"
                " positional arguments; pass the parameters by position"
            )

        def floats(leaf: Any) -> Any:
            if isinstance(leaf, Deferred):
                return jax.ShapeDtypeStruct(leaf.kernel_shape, leaf.described.dtype)
            if isinstance(leaf, Parameter | Stored):
                return parameter_of(leaf).kernel()
            return leaf

        params = jax.tree.map(floats, args[self.params], is_leaf=is_quantized)
        return (*args[: self.params], params, *args[self.params + 1 :])


def _as_read(parameter: Parameter) -> Stored | Deferred:
    """Return the values of a parameter; a stack of entries reads them by itself."""
    return parameter if isinstance(parameter, Deferred) else parameter.read()


def _check_state(stored: Mapping[str, object], leaves: Mapping[str, object]) -> None:
    """Raise unless a state belongs to these parameters.

    It has to hold all parameters that are shapes without values.
    """
    for path in sorted(stored):
        if path not in leaves:
            raise ValueError(
                f"the state holds {path!r}, but the parameters have only"
                f" {', '.join(sorted(leaves)[:8])}; pass the state of these parameters"
            )
    for path, leaf in leaves.items():
        if isinstance(leaf, SHAPES) and path not in stored:
            raise ValueError(
                f"{path!r} is a shape without values, and the state lacks it; pass the"
                " parameter"
            )


def _parameter(
    leaf: Any,
    stored: PyTree,
    weight: Weight | None,
    dtype: DTypeLike | None,
    *,
    rounded: bool,
) -> Shown:
    """Return a parameter as an input of the program, with its stored form if that fits.

    `dtype` is its gradient's.
    """
    if isinstance(stored, PackedTCFP12):
        # Floats that are there too belong to a table: they are looked up, and its codes
        # multiplied.
        if weight is not None and not isinstance(leaf, SHAPES):
            stored = _quantized(stored.dequantize(leaf.dtype), weight)
        else:
            leaf = stored.dequantize(leaf.dtype)
            stored = None
    if rounded:
        leaf = fake_quantize(leaf)
    if weight is None:
        return Shown.of(leaf, None, None, dtype)
    if stored is not None and not isinstance(leaf, SHAPES):
        # A stage of a pipeline has its part of a stack of layers, which may be a single
        # layer: its axis has no view.
        extra = len(stored.stack)
        is_matrix = len(weight.layout.matrix_shape(leaf.shape)) == 2
        if is_matrix and stored.stack == (1,) * extra:
            stored = jax.tree.map(lambda a: a.reshape(a.shape[extra:]), stored)
        weight.layout.check(stored, leaf.shape)
        stored = current(stored, weight.layout.matrix(leaf))
    return Shown.of(leaf, stored, weight, dtype)


def _quantized(kernel: Array, weight: Weight) -> Stored:
    """Return the stored form of a kernel that was packed.

    Each matrix of a stack has random bits of its own, as in products.
    """
    # only evaluation comes here, and its calls repeat
    key = jax.random.key(0) if weight.recipe.stochastic else None
    matrix = weight.layout.matrix(kernel)
    return quantize_weight(matrix, weight.recipe, key=key)[0]


def transform(
    fn: Function,
    recipe: Recipe | str,
    *,
    params: int = 0,
    rules: Rules = None,
    include: Iterable[Include] | Include = ("linear",),
    strict: bool = False,
) -> Transformed:
    """Return `fn` with its products of parameters and inputs computed by `recipe`.

    Use this for a model that is a plain function; use `convert_to_tcfp` for a Flax
    model, and `tcfp_jax.matmul` for a single product. Like `jax.grad` and
    `jax.checkpoint` it takes and returns a function, and it composes with them, with
    `jax.jit`, `jax.vmap` and control flow, inside and outside. It follows parameters
    through reshapes, transposes, casts, slices and loops over stacks, so that the
    optimizer's stored weights fit and gradients go straight to the parameters.

    Args:
      fn: any function of arrays. It is traced, as `jax.jit` traces.
      recipe: a `Recipe` or the name of one.
      params: the positional argument that holds the parameters.
      rules: pairs of a regex and a recipe (None: no change), as a mapping or a
        sequence. The regex is matched against the parameter's path
        ("block_0/mlp/kernel"), its layer's path and the named scope of the product. Or
        functions `(path, product)` to a recipe, or None for no opinion. The first match
        wins, also over `include`. The pair `(regex, "inline")` opens functions with a
        `jax.custom_vjp` that read such a weight: their products convert, and the
        gradient is ours instead of theirs.
      include: groups of products that take `recipe` without a rule. "linear" is every
        product but the output head. "head" is the head, the product that makes the
        model's output. "small" adds matrices with a side below 1024, which are slower
        than in BF16. "measured" takes products of "linear" (and of "head", if named)
        that were measured to be faster than BF16 on this device. Each call is judged by
        its own rows, at any size. Size decides for a shape, recipe or device that was
        not timed. "embed" is tables whose rows are looked up: they are stored like
        kernels, and rows are dequantized from the stored form. A float table without
        one is read unchanged. "norm" (or "layer_norm") is gains and their biases, which
        are rounded to the packed format.
      strict: raise if a product has no low-precision form and no rule excludes it,
        or if a rule matches nothing.

    Raises:
      TypeError: `fn` is not a function.
      ValueError: an unknown recipe or group, or a rule that is not a regex.

    >>> def apply(params, x):
    ...     return x @ params["w"]
    >>> low = transform(apply, "tensorwise", include=("linear", "small"))
    >>> low({"w": jax.numpy.ones((4, 2))}, jax.numpy.ones((3, 4)))[0].tolist()
    [4.0, 4.0]
    """
    if isinstance(fn, nn.Module | nnx.Module):
        raise TypeError(
            f"fn is the module {type(fn).__name__}; use convert_to_tcfp(model, recipe,"
            " *inputs), or pass a function of parameters and inputs, such as lambda"
            " params, x: model.apply({'params': params}, x)"
        )
    if not callable(fn):
        raise TypeError(
            f"fn is a {type(fn).__name__}; pass a function of parameters and inputs"
        )
    return Transformed(fn, policy(recipe, rules, include), params, strict=strict)
