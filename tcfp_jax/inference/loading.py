"""Quantized weights from a checkpoint, or into an NNX model."""

import math
from collections.abc import Mapping

import jax
import numpy as np
from flax import linen as nn
from flax import nnx
from jax import Array

from pallas_kernels.numerics import FLOAT8_DTYPES
from pallas_kernels.operands import SCALE_DTYPE, Fp4, Operand
from tcfp_jax import paths
from tcfp_jax.conversion import nnx_modules
from tcfp_jax.conversion.convert import hand_out
from tcfp_jax.inference.checks import RecipeOrWeights, check_weights, part_of
from tcfp_jax.inference.shared_scales import check_rule
from tcfp_jax.layers import Absent
from tcfp_jax.paths import PyTree, Tree
from tcfp_jax.recipes import Recipe
from tcfp_jax.recipes import recipe as named_recipe
from tcfp_jax.weights.stored import Stored
from tcfp_jax.weights.tcfp12 import PackedTCFP12

_REPAIR = "pass the recipe that the weights were quantized by"
# Bits of 2**121, the scale of float32's largest value
_LARGEST_SCALE = (121 + 127) << 23


def restored(variables: Tree, recipe: RecipeOrWeights) -> dict[str, PyTree]:
    """Return variables of `quantize_params` from the plain dicts of a checkpoint.

    Use this if Orbax loaded a checkpoint without a template: it then makes dicts of
    stored weights. With a template (`jax.eval_shape` of `quantize_params`) it is not
    needed. The recipe says which values share a scale, and the rule of FP4's scales.

    Args:
      variables: `{"params": ..., "tcfp": ...}`, nested dicts.
      recipe: the argument of `quantize_params`.

    Raises:
      ValueError: the variables are not such dicts, or the recipe does not name a
        weight. Weights are packed: a dict does not hold their length. Arrays do not fit
        each other. Scales have another scaling than the recipe, have values that no
        quantizer makes, or break its rule "fold_exact".

    >>> import jax.numpy as jnp
    >>> from tcfp_jax.inference import quantize_params
    >>> served = quantize_params({"kernel": jnp.ones((32, 4))}, "tensorwise")
    >>> one = served["tcfp"]["kernel"].forward
    >>> forward = {"values": one.values, "scale": one.scale}
    >>> plain = {"kernel": {"forward": forward, "backward": None}}
    >>> again = restored({"params": {}, "tcfp": plain}, "tensorwise")
    >>> again["tcfp"]["kernel"].shape
    (32, 4)
    """
    check_weights(recipe)
    found: dict[str, PyTree] = {}
    for path, node in paths.leaves(part_of(variables, "tcfp"), _is_weight).items():
        if isinstance(node, Mapping):
            node = _stored_of(path, node, recipe)
        paths.put(found, path.split("/"), node)
    return {**variables, "tcfp": found}


def _is_weight(node: object) -> bool:
    """Return whether a node is a leaf, or the dict of a stored weight."""
    if not isinstance(node, Mapping):
        return True
    sides = ("forward", "backward", "codes")
    return any(str(name).startswith(sides) for name in node)


def _stored_of(path: str, node: Tree, recipe: RecipeOrWeights) -> Stored:
    """Return a stored weight from the dict that a checkpointer made of it."""
    if "codes" in node:
        raise ValueError(
            f"{path} is packed, and its length is not in the checkpoint; restore it"
            " with a template: checkpointer.restore(path, jax.eval_shape(lambda:"
            " quantize_params(params, recipe, storage='packed')))"
        )
    if not isinstance(recipe, Mapping):
        how = named_recipe(recipe)
    elif path in recipe:
        how = recipe[path].recipe
    else:
        raise ValueError(
            f"{path} is stored, but the weights given have only {sorted(recipe)[:8]};"
            " pass find_weights"
        )
    forward = _operand_of(path, node, "forward", how)
    backward = _operand_of(path, node, "backward", how)
    if forward is None and backward is None:
        raise ValueError(
            f"{path} has neither the operand forward nor backward; restore the whole"
            " file"
        )
    return Stored(forward, backward)


def _operand_of(path: str, node: Tree, side: str, recipe: Recipe) -> Operand | None:
    """Return one side of a stored weight, or None if the dict lacks it."""
    # A format other than E4M3 is part of the name, see `Stored`.
    entries = [node[name] for name in node if str(name).startswith(side)]
    entry: PyTree = next((one for one in entries if one is not None), {})
    if isinstance(entry, Mapping) and not entry:
        return None
    arrays: dict[str, PyTree] = {}
    if isinstance(entry, Mapping):
        arrays = {name: part for name, part in entry.items() if part is not None}
    known = {"values", "scale", "lo", "lo_scale", "outer"}
    is_whole = {"values", "scale"} <= arrays.keys() <= known and all(
        hasattr(part, "dtype") for part in arrays.values()
    )
    if not is_whole or len(arrays["values"].shape) < 2:
        has = sorted(map(str, arrays)) or type(entry).__name__
        raise ValueError(
            f"{path} has {has} as {side}, which is no stored weight; restore the"
            " whole file again"
        )
    made = Operand(**arrays, scaling=recipe.scaling)
    _check_operand(path, made)
    check_rule(path, made, _REPAIR)
    return made


def _check_operand(path: str, weight: Operand) -> None:
    """Raise a ValueError if the arrays of a weight do not fit its scaling."""
    scaling = weight.scaling
    wanted = (np.dtype(scaling.scale_dtype), scaling.scale_shape(weight.shape))
    found = (np.dtype(weight.scale.dtype), tuple(weight.scale.shape))
    values = weight.values
    is_packed = values.dtype == np.uint8
    if found != wanted or scaling.packed != is_packed:
        raise ValueError(
            f"{path} is {values.dtype}{list(values.shape)}, whose scales"
            f" with {scaling} are {wanted[0]}{list(wanted[1])}, but these are"
            f" {found[0]}{list(found[1])}; {_REPAIR}"
        )
    if not is_packed and values.dtype not in FLOAT8_DTYPES:
        raise ValueError(
            f"{path} is {values.dtype}, which is neither FP8 nor packed FP4"
            f" codes; {_REPAIR}"
        )
    expected = {
        "lo": (values.dtype, values.shape),
        "lo_scale": found,
        "outer": (np.dtype(np.float32), values.shape[:-2]),
    }
    for name, (dtype, shape) in expected.items():
        one = getattr(weight, name)
        if one is not None and (one.dtype, tuple(one.shape)) != (dtype, shape):
            raise ValueError(
                f"{name} of {path} is {one.dtype}{one.shape}, not {dtype}{shape};"
                " restore the whole file"
            )
    _check_scales(path, weight)


def _check_scales(path: str, weight: Operand) -> None:
    """Raise a ValueError for scales that no quantizer makes.

    NaN is one that they make: it says that the values were lost.
    """
    for name in ("scale", "lo_scale", "outer"):
        scale = getattr(weight, name)
        if isinstance(scale, jax.core.Tracer | jax.ShapeDtypeStruct | None):
            continue
        if scale.dtype == SCALE_DTYPE or not getattr(
            scale, "is_fully_addressable", True
        ):
            continue
        bits = np.asarray(scale).astype(np.float32).reshape(-1).view(np.int32)
        # Zero is the scale of FP4 blocks of zeros. Some devices read subnormals as
        # zero, and others do not.
        is_zero = weight.scaling.packed & (bits == 0)
        least = np.where(is_zero, 0, 1 << 23)
        is_nan = bits & 0x7FFFFFFF > 0x7F800000
        wrong = ((bits < least) | (bits > _LARGEST_SCALE)) & ~is_nan
        if np.any(wrong):
            raise ValueError(
                f"{name} of {path} has {bits[wrong].view(np.float32)[0]:g}, and"
                " quantizers make scales from 2**-126 to 2**121, or 0 for FP4 blocks"
                " of zeros; the file is damaged, or another library wrote it"
            )


def load_quantized(model: nnx.Module, variables: Tree) -> None:
    """Put inference weights into a converted NNX model, in place of float kernels.

    Use this to serve an NNX model; a Linen model applies the variables itself. The
    model may hold no arrays at all (`nnx.eval_shape(lambda: Model(rngs))`, then
    `convert_to_tcfp`). Each float kernel is replaced by its shape: `export` raises, and
    code that reads the kernel reads the stored weight.

    Args:
      model: converted by the recipe and rules of the weights.
      variables: from `quantize_params` or `unpack`.

    Raises:
      TypeError: the model is not an NNX model; a Linen model applies `variables`
        itself.
      ValueError: the layer of a weight is not low-precision here, the variables or the
        model lack a parameter, or scales have values that no quantizer makes.

    >>> from tcfp_jax.nnx import TCFPLinear
    >>> from tcfp_jax.inference import quantize_params
    >>> model = TCFPLinear(4, 2, rngs=nnx.Rngs(0))
    >>> params = nnx.state(model, nnx.Param)
    >>> load_quantized(model, quantize_params(params, "tcfp12"))
    >>> model.kernel
    Absent(shape=(4, 2), dtype=dtype('float32'))
    """
    if not isinstance(model, nnx.Module):
        hint = ""
        if isinstance(model, nn.Module):
            hint = "; a Linen model applies the variables itself"
        raise TypeError(f"{type(model).__name__} is not a flax.nnx.Module{hint}")
    stored = paths.entries(part_of(variables, "tcfp"))
    params = paths.entries(part_of(variables, "params"))
    _check_stored(stored)
    own = _Held(model)
    own.check(stored, params)
    if hand_out(model, stored) < len(stored):
        raise ValueError(
            "a stored weight has no low-precision layer here; convert the model by the"
            " recipe and rules of the weights"
        )
    for path in stored.keys() - params.keys() - own.absent.keys():
        own.drop(path)
    # Dropout is off in inference; a stream that is used draws from a fixed key
    for path in own.streams_without(params):
        stream = own.variables[path]
        is_key = isinstance(stream, nnx.RngKey)
        stream.set_raw_value(jax.random.key(0) if is_key else jax.numpy.uint32(0))
    for path, value in params.items():
        own.set(path, value)


class _Held:
    """The arrays that an NNX model holds now.

    Attributes:
      nodes: all nodes of the model, by path.
      variables: its variables, by path.
      absent: kernels that an earlier call replaced by their shapes.
      parameters: paths of its parameters, also of those that are absent.
      arrays: paths of attributes that are arrays without a variable, such as a table of
        rotations. They are a part of the state as well.
    """

    def __init__(self, model: nnx.Module) -> None:
        self.nodes = dict(nnx.iter_graph(model))
        self.variables: dict[str, nnx.Variable] = {}
        self.arrays: dict[str, nnx_modules.Path] = {}
        replaced = nnx_modules.absent_of(model)
        self.absent = {path: kernel for path, (kernel, _) in replaced.items()}
        self.parameters = set(self.absent)
        for path, node in self.nodes.items():
            name = "/".join(map(str, path))
            if isinstance(node, nnx.Variable):
                self.variables[name] = node
                if isinstance(node, nnx.Param):
                    self.parameters.add(name)
            elif hasattr(node, "dtype") and not isinstance(node, Absent):
                self.arrays[name] = path

    def check(self, stored: Tree, params: Tree) -> None:
        """Raise a ValueError unless these weights and parameters are the model's."""
        extra = stored.keys() - self.parameters
        if extra:
            raise ValueError(
                f"no parameter of the model is {min(extra)}; convert the"
                " model by the recipe and rules of the weights"
            )
        lost = self.parameters - stored.keys() - params.keys()
        if lost:
            raise _another_model(min(lost), "model", "variables")
        extra = params.keys() - self.variables.keys() - self.arrays.keys()
        if extra:
            path = min(extra)
            if path in self.parameters:
                raise _another_model(path, "model", "variables")
            raise _another_model(path, "variables", "model")
        empty = self.empty_without(params)
        empty -= set(self.streams_without(params))
        if empty:
            raise ValueError(
                f"the model has no value for {min(empty)}; quantize"
                " nnx.state(model), which holds all variables, instead of"
                " nnx.state(model, nnx.Param)"
            )
        for path, value in {**stored, **params}.items():
            if path in self.variables:
                _check_size(path, value, self.variables[path].get_raw_value())
            elif path in self.absent:
                _check_size(path, value, self.absent[path])

    def empty_without(self, params: Tree) -> set[str]:
        """Return the other variables that hold no value and are not among these."""
        others = self.variables.keys() - self.parameters - params.keys()
        return {
            path
            for path in others
            if isinstance(self.variables[path].get_raw_value(), jax.ShapeDtypeStruct)
        }

    def streams_without(self, params: Tree) -> list[str]:
        """Return the streams of random keys among `empty_without`."""
        return [
            path
            for path in self.empty_without(params)
            if isinstance(self.variables[path], nnx.RngState)
        ]

    def drop(self, path: str) -> None:
        """Replace a float kernel by its shape, wherever layers share it."""
        variable = self.variables[path]
        shape = tuple(variable.shape)
        kernel = nnx.static(Absent(shape, np.dtype(variable.dtype)))
        for owner in self.nodes.values():
            entries: dict[str, PyTree] = {}
            if isinstance(owner, dict):
                entries = owner
            elif isinstance(owner, nnx.Pytree):
                entries = vars(owner)
            for name in [n for n, value in entries.items() if value is variable]:
                nnx_modules.put(owner, name, kernel)

    def set(self, path: str, value: Array) -> None:
        """Set a variable, or an array without one."""
        if path in self.variables:
            self.variables[path].set_raw_value(value)
            return
        *above, name = self.arrays[path]
        nnx_modules.put(self.nodes[tuple(above)], name, nnx.data(value))


def _another_model(path: str, has: str, lacks: str) -> ValueError:
    return ValueError(
        f"the {has} has {path}, which the {lacks} lacks; pass the weights of this very"
        " model"
    )


def _check_stored(stored: Tree) -> None:
    """Raise a ValueError unless these are stored weights with scales that can be."""
    if not all(isinstance(weight, Stored | PackedTCFP12) for weight in stored.values()):
        raise ValueError(
            "the weights are the plain dicts of a checkpoint that was loaded without a"
            " template; pass restored(variables, find_weights(model))"
        )
    for path, weight in stored.items():
        if not isinstance(weight, Stored):
            continue
        for operand in (weight.forward, weight.backward):
            if operand is not None:
                _check_scales(path, operand)


def _check_size(path: str, given: PyTree, own: PyTree) -> None:
    """Raise a ValueError if a value is not of the size that the model has there."""
    size = math.prod(getattr(given, "shape", (-1,)))
    wanted = math.prod(getattr(own, "shape", (-1,)))
    # a zero code may follow an odd k
    is_fp4 = isinstance(getattr(given, "scaling", None), Fp4)
    if wanted < 0 or size == wanted or (is_fp4 and wanted < size <= 2 * wanted):
        return
    has = getattr(given, "shape", type(given).__name__)
    raise ValueError(
        f"{path} is {has}, in the model {own.shape}; pass the weights of this very"
        " model"
    )
