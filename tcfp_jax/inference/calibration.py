"""`hessians` collects the inputs of every weight of a model; `choose_codes` puts FP4 codes of your choice into it.

moments = hessians(model, params, batches)
served = quantize_params(params, find_weights(model))                # of recipe("nvfp4")
served = choose_codes(served, params, find_weights(model), lambda path, w: gptq(w, moments[path]))
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import jax
from flax import linen as nn

from pallas_kernels.operands import Fp4, Operand
from tcfp_jax import paths
from tcfp_jax.conversion import linen_models
from tcfp_jax.conversion.transform import Transformed
from tcfp_jax.inference.probes import second_moments
from tcfp_jax.inference.shared_scales import families, store_together
from tcfp_jax.linen import switched_off
from tcfp_jax.paths import PyTree
from tcfp_jax.weights.layout import Weight
from tcfp_jax.weights.stored import Stored


def hessians(model: Transformed | nn.Module, params: PyTree, batches: Iterable[object]) -> dict[str, jax.Array]:
    """Return the sum of x xᵀ over the inputs x of every converted weight, by path.

        H = sum over batches and rows of x xᵀ            float32 [*stack, k, k], a matrix for each layer of a loop

    `gptq` reads it, and `search_scales` its diagonal. The float model computes the inputs, whatever the recipe.

    Args:
      model: from `transform`, or a Linen model of `convert_to_tcfp`. For an NNX model, transform the function
        `lambda state, x: nnx.merge(graph, state)(x)`.
      params: its float parameters.
      batches: arguments of the model after its parameters: an array, or a tuple. Each shape is compiled once.

    Raises:
      TypeError: the model is neither.
      ValueError: there is no batch, nothing is converted, or the products of a weight cannot be seen.

    >>> import jax.numpy as jnp
    >>> from tcfp_jax.conversion.transform import transform
    >>> low = transform(lambda params, x: x @ params["w"], "tensorwise", include=("linear", "small"))
    >>> hessians(low, {"w": jnp.ones((2, 4))}, [jnp.array([[1.0, 2.0]]), jnp.array([[1.0, 0.0]])])["w"].tolist()
    [[2.0, 2.0], [2.0, 4.0]]
    """
    run = _function_of(model)
    moments = jax.jit(lambda params, args: second_moments(run, params, *args))
    total: dict[str, jax.Array] | None = None
    for batch in batches:
        found = moments(params, batch if isinstance(batch, tuple) else (batch,))
        total = found if total is None else _added(total, found)
    if total is None:
        raise ValueError("batches is empty; a calibration needs at least one")
    return total


_added = jax.jit(lambda a, b: jax.tree.map(lambda x, y: x + y, a, b), donate_argnums=0)


def _function_of(model: Transformed | nn.Module) -> Transformed:
    if isinstance(model, Transformed):
        return model
    conversion = linen_models.conversion_of(model) if isinstance(model, nn.Module) else None
    if conversion is None:
        raise TypeError(
            f"the model is a {type(model).__name__}, which is neither from transform nor a converted Linen model; pass "
            "transform(lambda params, x: ..., recipe)"
        )
    plain = linen_models.plain(model)

    def call(params: PyTree, *args: object) -> PyTree:
        with switched_off(conversion.policy.off, conversion.policy.is_off):
            return plain.apply({"params": params}, *args)

    return Transformed(call, conversion.policy, 0, name=type(plain).__name__)


def choose_codes(
    served: Mapping[str, PyTree],
    params: PyTree,
    weights: Mapping[str, Weight],
    choose: Callable[[str, jax.Array], Operand],
    *,
    fused: Sequence[Sequence[str]] = (),
) -> dict[str, PyTree]:
    """Return variables of `quantize_params` in which your function has chosen the codes of every FP4 weight.

    Products read these codes and scales like those of a rule.

    Args:
      served: from `quantize_params(params, weights)`.
      params: the float parameters, nested dicts.
      weights: from `find_weights`.
      choose: takes a path and a float32 matrix, or stack of matrices, `[..., n, k]`, such as
        `lambda path, w: gptq(w, moments[path], Fp4(rule="four_over_six"))`. The result has the format and tile of the
        recipe. It keeps its own rule, because products follow the rule of the codes; but FP8 products of a recipe with
        the rule "fold_exact" rely on it, so there the result must have it, too.
      fused: as in `quantize_params`; the rows of a group are chosen as one matrix, by the path of the first.

    Raises:
      ValueError: no weight is FP4, one has an odd k, a group is not there, or a chosen operand does not fit: its shape,
        its format, a rule other than the recipe's "fold_exact", or scales that break that rule.

    >>> import jax.numpy as jnp
    >>> from tcfp_jax.inference import quantize_params, search_scales
    >>> from tcfp_jax.recipes import recipe
    >>> from tcfp_jax.weights.layout import Layout
    >>> params, weights = {"w": jnp.ones((32, 4))}, {"w": Weight(recipe("nvfp4"), Layout((0,), (1,)))}
    >>> served = quantize_params(params, weights)
    >>> chosen = choose_codes(served, params, weights, lambda path, w: search_scales(w))
    >>> chosen["tcfp"]["w"].shape
    (32, 4)
    """
    leaves = paths.leaves(params)
    stored = paths.entries(served["tcfp"])
    packed = {path: one for path, one in stored.items() if isinstance(one, Stored) and isinstance(one.scaling, Fp4)}
    if not packed:
        raise ValueError('no stored weight is FP4; make some by quantize_params(params, weights) with recipe("nvfp4")')
    chosen: dict[str, PyTree] = {}
    made = dict(stored)
    for family in families(packed, fused):
        made |= store_together(family, leaves, weights, choose)
    for path, one in made.items():
        paths.put(chosen, path.split("/"), one)
    return {**served, "tcfp": chosen}
