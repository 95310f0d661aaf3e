"""Subjects that other packages define: tunix, DeepMind's gemma, MaxText, Equinox,
Haiku, Haliax and Levanter.
"""

import contextlib
import functools
from typing import Any

import jax
import jax.numpy as jnp

from tests.wild.made import (
    BATCH,
    LENGTH,
    VOCABULARY,
    WIDTH,
    Made,
    filled,
    floats,
    linen_made,
    nnx_made,
    subject,
    tokens,
    without_meshes,
)

POSITIONS = jnp.broadcast_to(jnp.arange(LENGTH), (BATCH, LENGTH))
CAUSAL = jnp.broadcast_to(
    jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), (BATCH, LENGTH, LENGTH)
)
TUNIX = dict(
    num_layers=2,
    embed_dim=WIDTH,
    hidden_dim=64,
    num_heads=2,
    head_dim=16,
    num_kv_heads=1,
)


def first(output):
    return output[0]


def tunix_made(make: Any) -> Made:
    without_meshes()
    return nnx_made(make, tokens(), POSITIONS, None, CAUSAL, select=first)


@subject("tunix llama3", "nnx", (15, 15), "tunix", rate=3e-4)
def tunix_llama3(**options: Any) -> Made:
    from tunix.models.llama3 import model

    config = model.ModelConfig(
        **TUNIX, vocab_size=VOCABULARY, rope_theta=10_000, norm_eps=1e-5, **options
    )
    return tunix_made(lambda rngs: model.Llama3(config, rngs=rngs))


@subject("tunix llama3, tied, remat", "nnx", (15, 15), "tunix", rate=1e-3)
def tunix_llama3_tied() -> Made:
    from tunix.models.llama3.model import RematConfig

    return tunix_llama3(weight_tying=True, remat_config=RematConfig.BLOCK)


def tunix_qwen3(**options: Any) -> Made:
    from tunix.models.qwen3 import model

    config = model.ModelConfig(
        **TUNIX, vocab_size=VOCABULARY, rope_theta=10_000, norm_eps=1e-5, **options
    )
    return tunix_made(lambda rngs: model.Qwen3(config, rngs=rngs))


subject("tunix qwen3", "nnx", (15, 15), "tunix", rate=1e-3)(tunix_qwen3)
subject("tunix qwen3 experts", "nnx", (35, 35), "tunix", rate=3e-4)(
    functools.partial(tunix_qwen3, num_experts=4, num_experts_per_tok=2)
)


@subject("tunix gemma", "nnx", (13, 13), "tunix", rate=1e-3)
def tunix_gemma() -> Made:
    from tunix.models.gemma import model

    config = model.ModelConfig(
        **TUNIX,
        num_embed=VOCABULARY,
        final_logit_softcap=None,
        use_post_attn_norm=False,
        use_post_ffw_norm=False,
        attention_types=(model.AttentionType.GLOBAL,) * 2,
    )
    return tunix_made(lambda rngs: model.Gemma(config, rngs=rngs))


@subject("tunix llama3 with qwix LoRA", "nnx", (39, 39), "tunix", "qwix", rate=1e-3)
def tunix_lora() -> Made:
    import qwix
    from flax import nnx

    made = tunix_llama3()
    names = ".*(q_proj|k_proj|v_proj|gate_proj|up_proj|down_proj).*"
    provider = qwix.LoraProvider(module_path=names, rank=4, alpha=4.0)
    model = qwix.apply_lora_to_model(
        made.model, provider, *made.inputs, rngs=nnx.Rngs(0)
    )
    return Made(model, made.inputs, select=first)


@subject("gemma", "linen", (11, 11), "gemma", rate=1e-3)
def gemma() -> Made:
    from flax import linen as nn

    # Importing gemma replaces `nn.Module.param` globally, and transformers' models
    # cannot call the new one.
    param = nn.Module.param
    try:
        from gemma import gm
        from gemma.gm.nn import _config, _modules, _transformer
    finally:
        nn.Module.param = param
    del gm
    config = _config.TransformerConfig(
        num_embed=VOCABULARY,
        embed_dim=WIDTH,
        hidden_dim=64,
        num_heads=2,
        head_dim=16,
        num_kv_heads=1,
        final_logit_softcap=None,
        use_post_attn_norm=False,
        use_post_ffw_norm=False,
        attention_types=(_modules.AttentionType.GLOBAL,) * 2,
    )

    class Gemma(_transformer.Transformer):
        INFO = _transformer.ModelInfo()

    return linen_made(
        Gemma(config=config, dtype=jnp.float32),
        tokens(),
        select=lambda output: output.logits,
    )


def maxtext(axis: int = 1, shards: int = 1, **options: Any) -> Made:
    """MaxText's llama2 decoder on a mesh of `shards` devices, with its layers scanned
    over a stack on `axis`.
    """
    import numpy as np
    from flax import linen as nn
    from maxtext.configs import pyconfig
    from maxtext.models import models
    from maxtext.utils import maxtext_utils
    from maxtext.utils.globals import MAXTEXT_CONFIGS_DIR

    settings = dict(
        run_name="wild",
        enable_checkpointing=False,
        base_num_decoder_layers=2,
        base_emb_dim=WIDTH,
        base_mlp_dim=64,
        base_num_query_heads=2,
        base_num_kv_heads=2,
        head_dim=16,
        vocab_size=VOCABULARY,
        max_target_length=LENGTH,
        per_device_batch_size=BATCH / shards,
        decoder_block="llama2",
        scan_layers=True,
        param_scan_axis=axis,
        attention="dot_product",
        dtype="float32",
        weight_dtype="float32",
        skip_jax_distributed_system=True,
        override_model_config=True,
        hardware="cpu",
        ici_fsdp_parallelism=shards,
        log_config=False,
        **options,
    )
    without_meshes()
    config = pyconfig.initialize(["", f"{MAXTEXT_CONFIGS_DIR}/base.yml"], **settings)
    devices = maxtext_utils.create_device_mesh(config, jax.devices()[:shards])
    mesh = jax.sharding.Mesh(np.asarray(devices), config.mesh_axes)
    model = models.transformer_as_linen(config, mesh, quant=None)

    def context() -> Any:
        stack = contextlib.ExitStack()
        if shards > 1:
            stack.enter_context(jax.set_mesh(mesh))
            stack.enter_context(nn.logical_axis_rules(config.logical_axis_rules))
        return stack

    inputs = (tokens(), POSITIONS)
    call = functools.partial(model.apply, enable_dropout=False)
    start = functools.partial(
        model.init, {"params": jax.random.key(0)}, enable_dropout=False
    )
    with context():
        shapes = jax.eval_shape(
            lambda: start(
                *inputs, decoder_segment_ids=jnp.ones((BATCH, LENGTH), jnp.int32)
            )
        )
    variables = filled(nn.unbox(shapes))

    def apply(params: Any, ids: Any, positions: Any) -> Any:
        output = call(
            {**variables, "params": params},
            ids,
            positions,
            decoder_segment_ids=jnp.ones_like(ids),
        )
        return output[0] if isinstance(output, tuple) else output

    return Made(apply, inputs, variables["params"], context=context)


for name, settings in (
    ("on axis 1", {}),
    ("on axis 0", {"axis": 0}),
    ("on a mesh", {"shards": 2}),
):
    subject(
        f"maxtext llama2 scanned {name}", "function", (8, 11), "maxtext", rate=3e-4
    )(functools.partial(maxtext, **settings))


def equinox_block() -> Any:
    import equinox as eqx

    class Block(eqx.Module):
        attention: eqx.nn.MultiheadAttention
        norms: list
        up: eqx.nn.Linear
        down: eqx.nn.Linear

        def __init__(self, key: Any) -> None:
            keys = jax.random.split(key, 3)
            self.attention = eqx.nn.MultiheadAttention(2, WIDTH, key=keys[0])
            self.norms = [eqx.nn.LayerNorm(WIDTH), eqx.nn.LayerNorm(WIDTH)]
            self.up = eqx.nn.Linear(WIDTH, 64, key=keys[1])
            self.down = eqx.nn.Linear(64, WIDTH, key=keys[2])

        def __call__(self, x: Any) -> Any:
            y = jax.vmap(self.norms[0])(x)
            x = x + self.attention(y, y, y, mask=CAUSAL[0])
            return x + jax.vmap(
                lambda row: self.down(jax.nn.gelu(self.up(self.norms[1](row))))
            )(x)

    return Block


@subject("equinox transformer, vmap", "function", (13, 13), "equinox", rate=1e-3)
def equinox_transformer() -> Made:
    import equinox as eqx

    class Decoder(eqx.Module):
        table: eqx.nn.Embedding
        blocks: list
        head: eqx.nn.Linear

        def __call__(self, ids: Any) -> Any:
            x = jax.vmap(self.table)(ids)
            for block in self.blocks:
                x = block(x)
            return jax.vmap(self.head)(x)

    keys = jax.random.split(jax.random.key(0), 4)
    model = Decoder(
        eqx.nn.Embedding(VOCABULARY, WIDTH, key=keys[0]),
        [equinox_block()(key) for key in keys[1:3]],
        eqx.nn.Linear(WIDTH, VOCABULARY, key=keys[3]),
    )
    params, static = eqx.partition(model, eqx.is_inexact_array)
    return Made(
        lambda params, ids: jax.vmap(eqx.combine(params, static))(ids),
        (tokens(),),
        params,
    )


@subject(
    "equinox stack, scan, checkpoint", "function", (3, 3), "equinox", target="square"
)
def equinox_stack() -> Made:
    import equinox as eqx

    class Layer(eqx.Module):
        up: eqx.nn.Linear
        gate: eqx.nn.Linear
        down: eqx.nn.Linear

        def __call__(self, x: Any) -> Any:
            return x + self.down(jax.nn.silu(self.gate(x)) * self.up(x))

    def make(key: Any) -> Any:
        a, b, c = jax.random.split(key, 3)
        linear = eqx.nn.Linear
        return Layer(
            linear(WIDTH, 64, key=a), linear(WIDTH, 64, key=b), linear(64, WIDTH, key=c)
        )

    layers = eqx.filter_vmap(make)(jax.random.split(jax.random.key(0), 3))
    params, static = eqx.partition(layers, eqx.is_inexact_array)

    def call(params: Any, x: Any) -> Any:
        step = eqx.filter_checkpoint(
            lambda x, layer: (jax.vmap(eqx.combine(layer, static))(x), None)
        )
        return jax.lax.scan(step, x, params)[0]

    return Made(call, (floats(16, WIDTH),), params)


def haiku_made(forward: Any, *inputs: Any) -> Made:
    import haiku as hk

    model = hk.without_apply_rng(hk.transform(forward))
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), *inputs))
    return Made(model.apply, inputs, filled(shapes))


@subject("haiku mlp", "function", (3, 3), "haiku", target="square")
def haiku_mlp() -> Made:
    import haiku as hk

    return haiku_made(lambda x: hk.nets.MLP([64, 64, 8])(x), floats(16, WIDTH))


@subject("haiku attention", "function", (13, 13), "haiku", rate=1e-3)
def haiku_attention() -> Made:
    import haiku as hk

    def forward(ids: Any) -> Any:
        x = hk.Embed(VOCABULARY, WIDTH)(ids)
        for _ in range(2):
            y = hk.LayerNorm(-1, True, True)(x)
            attend = hk.MultiHeadAttention(
                2, 16, w_init=hk.initializers.VarianceScaling(1.0), model_size=WIDTH
            )
            x = x + attend(y, y, y, mask=CAUSAL[:, None])
            x = x + hk.nets.MLP([64, WIDTH], activation=jax.nn.gelu)(
                hk.LayerNorm(-1, True, True)(x)
            )
        return hk.Linear(VOCABULARY)(x)

    return haiku_made(forward, tokens())


@subject("haiku layer_stack", "function", (3, 3), "haiku", target="square")
def haiku_stack() -> Made:
    import haiku as hk

    def block(x: Any) -> Any:
        return x + hk.Linear(WIDTH)(
            jax.nn.silu(hk.Linear(64)(x)) * hk.Linear(64, name="gate")(x)
        )

    return haiku_made(
        lambda x: hk.experimental.layer_stack(3)(block)(x), floats(16, WIDTH)
    )


@subject("haiku LSTM in scan", "function", (2, 2), "haiku", rate=1e-2)
def haiku_lstm() -> Made:
    import haiku as hk

    def forward(ids: Any) -> Any:
        x = hk.Embed(VOCABULARY, WIDTH)(ids)
        core = hk.LSTM(WIDTH)
        y, _ = hk.dynamic_unroll(core, x, core.initial_state(BATCH), time_major=False)
        return hk.Linear(VOCABULARY)(y)

    return haiku_made(forward, tokens())


def haliax_made(model: Any, call: Any, *inputs: Any) -> Made:
    import equinox as eqx

    params, static = eqx.partition(model, eqx.is_inexact_array)
    return Made(
        lambda params, *inputs: call(eqx.combine(params, static), *inputs).array,
        inputs,
        params,
    )


# Haliax multiplies each weight by a scale of 1.
@subject("haliax mlp", "function", (3, 3), "haliax", target="square")
def haliax_mlp() -> Made:
    import haliax as hax
    from haliax import nn

    rows, wide, out = hax.make_axes(rows=16, wide=WIDTH, out=8)
    model = nn.MLP.init(wide, out, width=64, depth=2, key=jax.random.key(0))
    return haliax_made(
        model, lambda model, x: model(hax.named(x, (rows, wide))), floats(16, WIDTH)
    )


@subject("haliax attention", "function", (4, 4), "haliax", target="square")
def haliax_attention() -> Made:
    import haliax as hax
    from haliax import nn

    batch, position, heads, size, wide = hax.make_axes(
        batch=BATCH, position=LENGTH, heads=2, size=16, wide=WIDTH
    )
    keys = position.alias("keys")
    layers = [
        nn.Linear.init(wide, (heads, size), key=jax.random.key(i)) for i in range(3)
    ]
    out = nn.Linear.init((heads, size), wide, key=jax.random.key(3))

    def call(model: Any, x: Any) -> Any:
        (q, k, v) = [
            layer(hax.named(x, (batch, position, wide))) for layer in model[:3]
        ]
        out = model[3]
        k, v = (values.rename({"position": "keys"}) for values in (k, v))
        return out(nn.attention.dot_product_attention(keys, size, q, k, v)).rearrange(
            (batch, position, wide)
        )

    return haliax_made([*layers, out], call, floats(BATCH, LENGTH, WIDTH))


@subject("levanter llama", "function", (8, 8), "levanter", rate=3e-4)
def levanter_llama() -> Made:
    import haliax as hax
    from levanter.layers.attention import AttentionMask
    from levanter.models.llama import LlamaConfig, LlamaLMHeadModel

    batch, vocabulary = hax.make_axes(batch=BATCH, vocab=VOCABULARY)
    config = LlamaConfig(
        seq_len=LENGTH,
        hidden_dim=WIDTH,
        intermediate_dim=64,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
    )
    model = LlamaLMHeadModel.init(vocabulary, config, key=jax.random.key(0))

    def call(model: Any, ids: Any) -> Any:
        return model(hax.named(ids, (batch, config.Pos)), AttentionMask.causal())

    return haliax_made(model, call, tokens())
