"""The Llama benchmark: its checks before the timing, its operations, and its kinds of
kernels.
"""

import argparse
import dataclasses
import json

import jax.numpy as jnp
import numpy as np

import tcfp_jax
from benchmarks import large, llama, llama_steps, records, report, timing
from benchmarks.harness import benchmark
from models.nets.gpt import GPT
from models.nets.shapes import GPTConfig, LlamaConfig, MoeConfig
from models.nets.sizes import MODELS
from tests.helpers import parametrize, refused, slow

INSTRUCTIONS = {  # name: types, scopes
    "input_reduce_fusion.1": ("(f32[8]{0}, bf16[8192,4096]{1,0})", "f/quantize_x/max"),
    "input_reduce_fusion.2": ("bf16[4096]{0}", "jit(f)/jit(quantize)/reduce_max"),
    "loop_add_fusion": ("f32[4096,4096]{1,0}", "jit(f)/optimizer/add"),
    "loop_multiply_fusion": ("bf16[8192,4096]{1,0}", "jit(f)/mlp_norm/mul"),
    "custom-call.3": ("f32[8,8]{1,0}", "jit(f)/wgrad/dot_general"),
}
PROGRAM = "ENTRY %main {\n  %x = bf16[8,4096]{1,0} parameter(0)\n"
for name, (types, scopes) in INSTRUCTIONS.items():
    PROGRAM += f'  %{name} = {types} fusion(%x), metadata={{op_name="{scopes}"}}\n'
KERNELS = {
    "nvjet_qqtst_256x128_128x4_2x1_v_bz_coopA_NNT": "products",
    "matmul_fp8_single_full_tensor_mosaic_gpu_kernel": "products",
    "custom_call_3": "products",
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma": "attention",
    "block_quantize": "quantization",
    "cast_transpose_fused_kernel_notaligned": "quantization",
    "input_reduce_fusion_2": "quantization",
    # it writes the tensor that the maximum is of
    "input_reduce_fusion_1": "norms and activations",
    "loop_multiply_fusion": "norms and activations",
    "loop_add_fusion": "optimizer",
    "adamw": "optimizer",
    "memcpy128": "copies",
    "Memset 0": "copies",
}


def test_kernels_are_summed_by_what_they_are_for():
    operations = timing.operations_of(PROGRAM)
    assert {name: timing.kind_of(name, operations) for name in KERNELS} == KERNELS
    sums = timing.milliseconds_by_kind([(name, 1.5) for name in KERNELS], PROGRAM)
    assert sums == {
        kind: 1.5 * list(KERNELS.values()).count(kind) for kind in timing.KINDS
    }


def test_operations_of_a_step_are_those_of_its_products():
    size = LlamaConfig(
        layers=3, width=64, heads=4, kv_heads=2, hidden=96, context=32, vocabulary=512
    )
    weights = 3 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96)
    scores = 3 * 2 * 32 * 32 * 64  # two products of a sequence, half of each masked
    assert llama.operations(size, (2, 32), "block") == 3 * 2 * (
        2 * 32 * weights + scores
    )
    assert llama.operations(size, (2, 32), "step") == 3 * 2 * (
        2 * 32 * (weights + 64 * 512) + scores
    )
    # 96 values, and a router
    sizes = dataclasses.asdict(size) | {
        "hidden": 40,
        "experts": 6,
        "chosen": 2,
        "shared": 16,
    }
    of_router = 3 * 64 * 6
    assert llama.operations(MoeConfig(**sizes), (2, 32), "block") == 3 * 2 * (
        2 * 32 * (weights + of_router) + scores
    )


def test_a_gpt_steps_as_well():
    options = argparse.ArgumentParser()
    llama.add_options(options)
    asked = options.parse_args(
        ["--model", "tiny", "--include", "measured"], argparse.Namespace(smoke=True)
    )
    config = llama.configure(asked)
    assert config.include == ("measured",)
    assert config.step == MODELS["tiny"]
    size = GPTConfig(layers=3, width=64, heads=4, context=32, vocabulary=512)
    scores = 3 * 2 * 32 * 32 * 64
    assert llama.operations(size, (2, 32), "step") == 3 * 2 * (
        2 * 32 * (3 * 12 * 64 * 64 + 64 * 512) + scores
    )
    model, weights = llama_steps.converted_step(
        dataclasses.replace(config, step=size, include=("linear",)), "tensorwise"
    )
    assert isinstance(model, GPT)
    assert weights == tcfp_jax.recipe("tensorwise")


@slow
def test_a_smoke_run_writes_a_table(tmp_path):
    rows = benchmark("llama").run(
        [
            "--smoke",
            "--out",
            str(tmp_path),
            "--parts",
            "block",
            "--recipes",
            "tensorwise",
        ],
    )
    assert [row.recipe for row in rows] == ["bf16", "tensorwise"]
    assert rows[0].speed_over_bf16 == 1
    assert rows[0].worst_snr_db is None
    assert 14 < rows[1].worst_snr_db < 40
    assert all(
        row.tokens == 64 and row.arena_bytes > 0 and row.kinds is None for row in rows
    )
    assert np.isclose(rows[1].tokens_per_second, 64e3 / rows[1].median_ms)
    path = tmp_path / records.device_slug() / "llama.json"
    page = report.render_section("llama", tmp_path)
    assert "| `tensorwise` |" in page
    assert "2 × 32 tokens" in page
    content = json.loads(path.read_text())
    for row in content["rows"]:
        row["kinds"] = {kind: 1.25 for kind in timing.KINDS}
    path.write_text(json.dumps(content))
    # five columns, between single bars
    assert report.render_section("llama", tmp_path).count("| 1.25 |") == 2 * 3


@slow  # quicker tests have wrong products of other benchmarks
def test_wrong_outputs_are_not_timed(monkeypatch):
    right = llama.MAKE["block"]

    def broken(config, name):
        made = right(config, name)

        def wrong():
            return {**made.outputs(), "y": jnp.zeros_like(made.args[2])}

        return made if name == "bf16" else made._replace(outputs=wrong)

    monkeypatch.setitem(llama.MAKE, "block", broken)
    with refused("tensorwise: y has", ArithmeticError):
        benchmark("llama").run(
            ["--smoke", "--parts", "block", "--recipes", "tensorwise"]
        )


def test_bad_names_are_errors():
    with refused("unknown"):
        benchmark("llama").run(["--smoke", "--recipes", "tensorwize"])


@slow
def test_a_large_run_compares_losses_on_text(tmp_path):
    rows = benchmark("large").run(
        ["--smoke", "--out", str(tmp_path), "--layers", "2", "--bf16-layers", "1"],
    )
    assert [(row.recipe, row.layers, len(row.losses)) for row in rows] == [
        ("bf16", 1, 2),
        ("stored", 2, 2),
    ]
    bf16, stored = rows
    assert np.isclose(
        stored.layer_speed_over_bf16, 2 * bf16.median_ms / stored.median_ms
    )
    assert bf16.layer_speed_over_bf16 == 1
    assert stored.step_bytes > stored.arena_bytes > 0
    result = records.read_result("large", tmp_path)
    assert result is not None
    assert "| `stored` | 2 |" in large.table(result)
    more = ["--smoke", "--out", str(tmp_path), "--steps", "32"]
    (alone,) = benchmark("large").run([*more, "--recipes", "bf16"])
    kept, stored = benchmark("large").run([*more, "--resume"])
    assert kept == alone
    assert len(stored.losses) == 32
    assert stored.text == kept.text
    gap = np.mean(np.subtract(stored.losses, kept.losses)[-large.LAST :])
    page = report.render_section("large-curves", tmp_path)
    assert f"**{gap:+.4f}** ± " in page
    assert "nats per token" in page
    assert abs(gap) < 0.02


@parametrize(
    "losses, first, message",
    [
        ((5.5, 5.4, 5.4, 5.5), 5.5, "do not fall"),
        ((5.5, float("nan"), 5.0, 4.0), 5.5, "do not fall"),
        ((5.5, 5.0, 4.5, 4.0), 5.8, "first loss is 5.5, BF16's 5.8"),
    ],
)
def test_losses_that_are_wrong_are_not_timed(losses, first, message):
    with refused(message, ArithmeticError):
        large.check_losses("stored", losses, first)


def test_bf16_has_no_more_layers_than_the_model():
    with refused("--bf16-layers 2 of a model with 1 layers"):
        benchmark("large").run(["--smoke", "--bf16-layers", "2"])
