"""Which elementwise parts of a program stand between its converted products: found in the trace, by what reads what.

    gate, up: results of products     h = silu(gate) * up     h: read by products alone          one `Fusion`

A part begins at x of a product and goes back as long as nothing else reads what it passes, so it never computes
anything twice but casts. It ends at what it cannot compute (another product, a sum over a row, a value that has a name
for `jax.checkpoint`), and at what others read, too. Where it ends at results of products that nothing else reads, their
gradients can come quantized.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax
from jax.extend import core

from pallas_kernels.dispatch import has_explicit_axes
from pallas_kernels.expression import equation_problem, form_of
from pallas_kernels.operands import Fp4, Row
from tcfp_jax.conversion.programs import PRODUCTS
from tcfp_jax.conversion.shown import Shown
from tcfp_jax.products import norm
from tcfp_jax.products.activation import Activation, activated, quantize_result
from tcfp_jax.products.norm import Norm, normed
from tcfp_jax.products.operands import Ends, quantize_operand
from tcfp_jax.recipes import Recipe

# May be done twice: a norm casts x for its sum, and once more for its result.
_CHEAP = frozenset({"convert_element_type", "broadcast_in_dim", "reshape", "squeeze"})
# More tensors than this are not held in registers by a kernel that computes their gradients.
MOST_INPUTS = 4


@dataclass(frozen=True)
class Fusion:
    """An elementwise part of a program.

    Attributes:
      at: number of the equation that makes its result.
      result: the variable.
      inputs: the variables it reads.
      activation: what it computes.
      readers: numbers of the products that read the result.
      producers: numbers of the products whose gradients come quantized, one for each input; none where they do not.
    """

    at: int
    result: Any
    inputs: tuple[Any, ...]
    activation: Activation
    readers: tuple[int, ...]
    producers: tuple[int, ...] = ()


@dataclass(frozen=True)
class NormPart:
    """A function of rows in a program.

    Attributes:
      at: number of the equation that makes its result.
      x: the variable whose rows it reads.
      vectors: the variables that it reads beside x.
      norm: what it computes.
      readers: numbers of the products that read the result.
    """

    at: int
    x: Any
    vectors: tuple[Any, ...]
    norm: Norm
    readers: tuple[int, ...]


def find_norms(jaxpr: Any, recipes: Mapping[int, Recipe], operands: Mapping[int, Any]) -> list[NormPart]:
    """The functions of rows before its converted products; arguments as those of `find`."""
    flow = _Flow(jaxpr, recipes)
    results: dict[Any, list[int]] = {}
    for number, var in operands.items():
        if _is_alone(recipes[number]):
            results.setdefault(flow.unnamed(var), []).append(number)
    found = (flow.norm(result, tuple(readers)) for result, readers in results.items())
    return [part for part in found if part is not None]


def find(jaxpr: Any, recipes: Mapping[int, Recipe], operands: Mapping[int, Any]) -> list[Fusion]:
    """The elementwise parts of a program before its converted products.

    Args:
      jaxpr: the program.
      recipes: of its converted products, by number.
      operands: their x, where a part may end in it: of products `x[..., k] @ w`.
    """
    flow = _Flow(jaxpr, recipes)
    results: dict[Any, list[int]] = {}
    for number, var in operands.items():
        if _quantizes_both(recipes[number]):
            results.setdefault(flow.unnamed(var), []).append(number)
    found = []
    for result, readers in results.items():
        if (fusion := flow.fusion(result, tuple(readers), operands)) is not None:
            found.append(fusion)
    return found


def _is_alone(recipe: Recipe) -> bool:
    """Whether nothing but products with a kernel of its own stands around its elementwise parts.

    Scales of rows are multiplied after a product, by XLA where its result is read: in a pass of its own where a kernel
    reads it. On an H200 what is no product took 6.0 ms of two Llama-8B blocks so, and 5.3 apart (LOG 23). FP4 products
    round their activations themselves.
    """
    return not isinstance(recipe.scaling, Row | Fp4)


def _quantizes_both(recipe: Recipe) -> bool:
    """Whether nothing but FP8 reads its x and its gradient."""
    fp8 = "bf16" not in (recipe.forward, recipe.dgrad, recipe.wgrad) and recipe.activation_halves == "hi"
    return fp8 and recipe.fp4 is None and _is_alone(recipe)


def _operands(recipe: Recipe) -> tuple[Any, ...]:
    """What decides how x and the gradient are quantized."""
    return recipe.activation, recipe.gradient, recipe.scaling.along_rows, recipe.quantize_backend


class _Flow:
    """Who makes and who reads each variable of a program."""

    def __init__(self, jaxpr: Any, recipes: Mapping[int, Recipe]) -> None:
        self.jaxpr, self.recipes = jaxpr, recipes
        self.makers = {var: number for number, eqn in enumerate(jaxpr.eqns) for var in eqn.outvars}
        self.readers: dict[Any, list[int]] = {}
        for number, eqn in enumerate(jaxpr.eqns):
            for var in eqn.invars:
                if not isinstance(var, core.Literal):
                    self.readers.setdefault(var, []).append(number)
        for var in jaxpr.outvars:
            if not isinstance(var, core.Literal):
                self.readers.setdefault(var, []).append(len(jaxpr.eqns))

    def maker(self, var: Any) -> Any:
        """The equation that makes a variable, or None."""
        number = self.makers.get(var)
        return None if number is None else self.jaxpr.eqns[number]

    def unnamed(self, var: Any) -> Any:
        """The variable before names for `jax.checkpoint`."""
        eqn = self.maker(var)
        return self.unnamed(eqn.invars[0]) if eqn is not None and eqn.primitive.name == "name" else var

    def read_by(self, var: Any) -> Iterator[int]:
        """The equations that read a variable, through names."""
        for number in self.readers.get(var, ()):
            if number < len(self.jaxpr.eqns) and self.jaxpr.eqns[number].primitive.name == "name":
                yield from self.read_by(self.jaxpr.eqns[number].outvars[0])
            else:
                yield number

    def fusion(self, result: Any, readers: tuple[int, ...], operands: Mapping[int, Any]) -> Fusion | None:
        """The part that ends in a result, or None where there is none that may be computed with its quantization."""
        if result not in self.makers or sorted(self.read_by(result)) != sorted(readers):
            return None
        recipe = self.recipes[readers[0]]
        if any(_operands(self.recipes[number]) != _operands(recipe) for number in readers):
            return None
        *leading, k = result.aval.shape
        m = result.aval.size // max(1, k)
        part, inputs = self._part(result, lambda eqn: equation_problem(eqn, m, k))
        matrices = [var for var in inputs if form_of(var.aval.shape, m, k) == "matrix"]
        if not leading or not 0 < len(matrices) <= MOST_INPUTS or not any(self._computes(number) for number in part):
            return None
        eqns = [self.jaxpr.eqns[number] for number in sorted(part)]
        program = _program(inputs, result, eqns)
        producers = self._producers(result, inputs, part, operands)
        made_by = self.recipes[producers[0]] if producers else None
        try:
            activation = Activation.of(program, recipe, made_by)
        except ValueError:  # its gradient is not elementwise
            return None
        return Fusion(self.makers[result], result, inputs, activation, readers, producers)

    def _computes(self, number: int) -> bool:
        return self.jaxpr.eqns[number].primitive.name not in _CHEAP

    def norm(self, result: Any, readers: tuple[int, ...]) -> NormPart | None:
        """The function of rows that ends in a result, or None where there is none."""
        if result not in self.makers or sorted(self.read_by(result)) != sorted(readers) or result.aval.ndim < 2:
            return None
        shape = result.aval.shape
        part, inputs = self._part(result, lambda eqn: norm.problem(eqn, shape))
        matrices = [var for var in inputs if var.aval.shape == shape]
        vectors = tuple(var for var in inputs if var.aval.shape == shape[-1:])
        sums = any(self.jaxpr.eqns[number].primitive.name.startswith("reduce_") for number in part)
        if not sums or len(matrices) != 1 or len(matrices) + len(vectors) != len(inputs):
            return None
        eqns = [self.jaxpr.eqns[number] for number in sorted(part)]
        program = _program((*matrices, *vectors), result, eqns)
        asked = Norm.of(program, len(readers), self.recipes[readers[0]].quantize_backend)
        return NormPart(self.makers[result], matrices[0], vectors, asked, readers)

    def _part(self, result: Any, problem: Callable[[Any], str | None]) -> tuple[set[int], tuple[Any, ...]]:
        """(numbers of its equations, the variables that it reads)."""
        part: set[int] = set()
        inputs: dict[Any, None] = {}
        waiting = {self.makers[result]}
        while waiting:
            number = max(waiting)  # readers come before what they read
            waiting.remove(number)
            eqn = self.jaxpr.eqns[number]
            own = all(
                var is result or set(self.readers.get(var, ())) <= part for var in eqn.outvars
            ) or eqn.primitive.name in _CHEAP  # fmt: skip
            if not own or eqn.primitive.name == "name" or problem(eqn) is not None:
                inputs.update(dict.fromkeys(eqn.outvars))
                continue
            part.add(number)
            for var in eqn.invars:
                if isinstance(var, core.Literal):
                    continue
                if var in self.makers:
                    waiting.add(self.makers[var])
                else:
                    inputs[var] = None
        read = {var for number in part for var in self.jaxpr.eqns[number].invars if not isinstance(var, core.Literal)}
        return part, tuple(var for var in inputs if var in read)

    def _producers(
        self, result: Any, inputs: tuple[Any, ...], part: set[int], operands: Mapping[int, Any]
    ) -> tuple[int, ...]:
        """The products that make all inputs, each read by this part alone; or none."""
        made = {var for number in part for var in self.jaxpr.eqns[number].outvars if var is not result}
        if not all(set(self.readers.get(var, ())) <= part for var in made):
            return ()  # a cast that others read, too: their gradients would be lost
        numbers = []
        for var in inputs:
            number = self.makers.get(self.unnamed(var))
            if number is None or number not in operands or not _quantizes_both(self.recipes[number]):
                return ()
            if not set(self.read_by(self.unnamed(var))) <= part or number in numbers:
                return ()
            numbers.append(number)
        alike = {_operands(self.recipes[number]) for number in numbers}
        return tuple(numbers) if len(alike) == 1 else ()


def _program(inputs: tuple[Any, ...], result: Any, eqns: list[Any]) -> Any:
    """The closed jaxpr of some equations."""

    def run(*values: jax.Array) -> jax.Array:
        env = dict(zip(inputs, values, strict=True))
        for eqn in eqns:
            found = eqn.primitive.get_bind_params(eqn.params)
            functions, params = found if isinstance(found, tuple) else ((), found)
            given = [var.val if isinstance(var, core.Literal) else env[var] for var in eqn.invars]
            made = eqn.primitive.bind(*functions, *given, **params)
            env.update(zip(eqn.outvars, made if eqn.primitive.multiple_results else [made], strict=True))
        return env[result]

    # The types themselves: in a `jax.shard_map` they also say over which axes of the mesh a value varies.
    return jax.make_jaxpr(run)(*(var.aval for var in inputs))


def operands_of(jaxpr: Any, recipes: Mapping[int, Recipe], shown: list[bool]) -> dict[int, Any]:
    """X of every converted product that is `x[..., k] @ w` or `x[..., k] @ wᵀ` with a matrix.

    Args:
      jaxpr: the program.
      recipes: of its converted products, by number.
      shown: of its constants and inputs, whether it is a view of a parameter.
    """
    views = {var for var, is_view in zip([*jaxpr.constvars, *jaxpr.invars], shown, strict=True) if is_view}
    found = {}
    for number, eqn in enumerate(jaxpr.eqns):
        if number in recipes and eqn.primitive.name in PRODUCTS:
            (axes, batch), (x, w) = eqn.params["dimension_numbers"], eqn.invars[:2]
            plain = axes[0] == (x.aval.ndim - 1,) and w.aval.ndim == 2 and not any(batch)
            if x not in views and w in views and plain and eqn.outvars[0].aval.dtype == x.aval.dtype:
                found[number] = x
        # A view of a view: what its rules refuse is no operand of a converted product.
        elif eqn.invars and not isinstance(eqn.invars[0], core.Literal) and eqn.invars[0] in views:
            views.update(eqn.outvars)
    return found


def alike(operands: Mapping[int, Any], recipes: Mapping[int, Recipe]) -> dict[int, tuple[int, ...]]:
    """Of each converted product that shares its x with others that quantize it alike: all of them.

    It is then quantized once. On one device XLA finds equal quantizations by itself; on several each has an all-reduce
    of its own amax, and no two of these are equal to XLA.
    """
    groups: dict[Any, list[int]] = {}
    for number, var in operands.items():
        if _quantizes_both(recipes[number]):
            groups.setdefault((var, _operands(recipes[number])), []).append(number)
    return {number: tuple(group) for group in groups.values() if len(group) > 1 for number in group}


class Between:
    """The parts of one run of a program: what products are given, and what they leave for others."""

    def __init__(self, jaxpr: Any, plan: Any, values: list[Any]) -> None:
        recipes = {number: step for number, step in plan if isinstance(step, Recipe)}
        self._parts: dict[int, Fusion] = {}
        self._norms: dict[int, NormPart] = {}
        self._quantized: dict[int, Any] = {}
        self._copies: dict[int, jax.Array] = {}
        self._carriers: dict[int, Any] = {}
        self._alike: dict[int, tuple[int, ...]] = {}
        self._operands: dict[int, Any] = {}
        self._recipes = recipes
        if recipes and not has_explicit_axes():
            operands = operands_of(jaxpr, recipes, [isinstance(value, Shown) for value in values])
            self._operands, self._alike = operands, alike(operands, recipes)
            here = (_here(part) for part in find(jaxpr, recipes, operands))
            self._parts = {part.at: part for part in here if part is not None}
            self._norms = {
                part.at: part for part in find_norms(jaxpr, recipes, operands) if part.norm.refuses() is None
            }
        self._producers = {number for part in self._parts.values() for number in part.producers}

    def product(self, number: int, multiply: Callable[..., Any], env: Mapping[Any, Any]) -> jax.Array:
        """What a product returns, given what a part, or another product of the same x, has quantized for it."""
        options: dict[str, Any] = {}
        if number in self._copies:
            options["given"] = self._copies[number]
        if number in self._alike and number not in self._quantized:
            recipe, x = self._recipes[number], options.get("given", env[self._operands[number]])
            with jax.named_scope("quantize_x"):
                quantized = quantize_operand(lax.stop_gradient(x), recipe.activation, recipe)
            self._quantized.update(dict.fromkeys(self._alike[number], quantized))
        x_quantized = self._quantized.get(number)
        if number not in self._producers:
            return multiply(**options, ends=Ends(x_quantized))
        result, self._carriers[number] = multiply(**options, ends=Ends(x_quantized, "quantized"))
        return result

    def replace(self, number: int, env: dict[Any, Any]) -> None:
        """Compute the part whose result equation `number` makes, in the place of that equation's value."""
        found, part = self._norms.get(number), self._parts.get(number)
        inputs = () if part is None else tuple(_array(env[var], var) for var in part.inputs)
        if found is not None:
            x, vectors = _array(env[found.x], found.x), tuple(_array(env[var], var) for var in found.vectors)
            env[found.x], copies = normed(found.norm, x, vectors)
            self._copies.update(zip(found.readers, copies, strict=True))
        if part is None:
            return
        quantized: Any = None
        if found is None:
            carriers = tuple(self._carriers[producer] for producer in part.producers)
            env[part.result], quantized = activated(part.activation, inputs, carriers)
        elif part.activation.result == "quantized":  # its gradients are the norm's
            quantized = quantize_result(part.activation, tuple(map(lax.stop_gradient, inputs)))
        if quantized is not None:
            self._quantized.update(dict.fromkeys(part.readers, quantized))


def _here(part: Fusion) -> Fusion | None:
    """What of it a kernel computes here, or None."""
    activation = part.activation.here([var.aval for var in part.inputs])
    if activation is None:
        return None
    return dataclasses.replace(part, activation=activation, producers=part.producers if activation.gradient else ())


def _array(value: Any, var: Any) -> jax.Array:
    return value.array(var.aval.shape) if isinstance(value, Shown) else value
