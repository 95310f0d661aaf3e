"""Blocks of a Llama and an MLP of NVIDIA's Transformer Engine for JAX, in FP8.

Norms, activations and products are Transformer Engine's own layers, which quantize
inside the kernels of norms and activations. Attention is that of `models.nets`. The
layers join matrices that read the same values: queries, keys and values are one kernel,
gate and up another, which is their fastest form.
"""

import contextlib
import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import Array

from models.nets.attention import causal_attention
from models.nets.positions import rotate, rotations
from models.nets.shapes import LlamaConfig

PACKAGE = "transformer_engine"
# Names of rows, and of the recipe in `transformer_engine.common.recipe`.
RECIPES = {
    "transformer_engine": "Float8CurrentScaling",
    "transformer_engine_delayed": "DelayedScaling",
}


def missing_reason() -> str | None:
    """Return why no row can be measured here; None if it can."""
    if importlib.util.find_spec(PACKAGE) is None:
        return f"{PACKAGE} is not installed (pip install {PACKAGE}[jax])"
    if jax.default_backend() != "gpu":
        return f"{PACKAGE} needs a GPU, and JAX runs on {jax.default_backend()}"
    return None


def quantizing(name: str) -> contextlib.AbstractContextManager[None]:
    """Return the context in which layers are traced with the recipe of a row."""
    library = importlib.import_module(f"{PACKAGE}.jax")
    recipes = importlib.import_module(f"{PACKAGE}.common.recipe")
    context: contextlib.AbstractContextManager[None] = library.autocast(
        enabled=True,
        recipe=getattr(recipes, RECIPES[name])(),
        mesh_resource=library.MeshResource(),
    )
    return context


def _layers() -> Any:
    return importlib.import_module(f"{PACKAGE}.jax.flax")


# Blocks of a Llama
# --------------------------------------------------------------------------------------


class Block(nn.Module):
    """One block, `[batch, positions, width]` to the same."""

    config: LlamaConfig

    @nn.compact
    def __call__(self, x: Array, rotation: Array) -> Array:
        """Apply causal attention and the SwiGLU, each around a residual connection."""
        config = self.config
        layers = _layers()
        normalized = {"layernorm_type": "rmsnorm", "epsilon": config.norm_eps}
        joined, _ = layers.LayerNormDenseGeneral(
            config.head_size * (config.heads + 2 * config.kv_heads),
            name="attention",
            **normalized,
        )(x)
        heads = joined.reshape(*x.shape[:-1], -1, config.head_size)
        query, key, value = jnp.split(
            heads, [config.heads, config.heads + config.kv_heads], axis=-2
        )
        attended = causal_attention(
            rotate(query, rotation), rotate(key, rotation), value, config.attention
        )
        attended = attended.reshape(*x.shape[:-1], config.heads * config.head_size)
        output = layers.DenseGeneral(config.width, use_bias=False, name="output")
        x = x + output(attended)
        y, _ = layers.LayerNormMLP(
            config.hidden, activations=("silu", "linear"), name="mlp", **normalized
        )(x)
        return x + y


class Blocks(nn.Module):
    """Blocks in sequence."""

    config: LlamaConfig

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Apply the blocks."""
        rotation = rotations(x.shape[1], self.config.head_size, self.config.rope_theta)
        for index in range(self.config.layers):
            x = Block(self.config, name=f"block_{index}")(x, rotation)
        return x


@dataclass(frozen=True)
class BlockNames:
    """The parameters of `Blocks`, made of those of plain blocks, and back.

    Attributes:
      config: The size of a block.
    """

    config: LlamaConfig

    def joined(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return the parameters of plain blocks as Transformer Engine's layers."""
        return {name: self._joined_block(block) for name, block in params.items()}

    def _joined_block(self, block: Mapping[str, Any]) -> dict[str, Any]:
        kernels = [block[name]["kernel"] for name in ("query", "key", "value")]
        gate_and_up = [block[name]["kernel"] for name in ("gate", "up")]
        return {
            "attention": {
                "scale": block["attention_norm"]["scale"],
                "kernel": jnp.concatenate(kernels, axis=1),
            },
            "output": {"kernel": block["output"]["kernel"]},
            "mlp": {
                "scale": block["mlp_norm"]["scale"],
                "wi_kernel": jnp.stack(gate_and_up, axis=1),
                "wo_kernel": block["down"]["kernel"],
            },
        }

    def separated(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return the parameters of Transformer Engine's layers as plain blocks."""
        return {name: self._separated_block(block) for name, block in params.items()}

    def _separated_block(self, block: Mapping[str, Any]) -> dict[str, Any]:
        size = self.config.head_size
        ends = [
            size * self.config.heads,
            size * (self.config.heads + self.config.kv_heads),
        ]
        query, key, value = jnp.split(block["attention"]["kernel"], ends, axis=1)
        mlp = block["mlp"]
        kernels = {
            "query": query,
            "key": key,
            "value": value,
            "output": block["output"]["kernel"],
            "gate": mlp["wi_kernel"][:, 0],
            "up": mlp["wi_kernel"][:, 1],
            "down": mlp["wo_kernel"],
        }
        norms = {
            "attention_norm": {"scale": block["attention"]["scale"]},
            "mlp_norm": {"scale": mlp["scale"]},
        }
        return norms | {name: {"kernel": kernel} for name, kernel in kernels.items()}


# The MLP of the training step's benchmark
# --------------------------------------------------------------------------------------


class MLP(nn.Module):
    """`W_2 relu(W_1 x)` without norm and bias, `[..., d]` to the same."""

    hidden: int

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Apply the layers."""
        y, _ = _layers().LayerNormMLP(
            self.hidden, enable_layernorm=False, activations=("relu",), name="mlp"
        )(x)
        return y


def joined_mlp(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of a plain MLP as Transformer Engine's layer."""
    first = params["dense_0"]["kernel"]
    second = params["dense_1"]["kernel"]
    return {"mlp": {"wi_kernel": first[:, None], "wo_kernel": second}}


def separated_mlp(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of Transformer Engine's layer as a plain MLP."""
    mlp = params["mlp"]
    first = mlp["wi_kernel"][:, 0]
    return {"dense_0": {"kernel": first}, "dense_1": {"kernel": mlp["wo_kernel"]}}
