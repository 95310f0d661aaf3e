"""Folders that compressed-tensors and Transformers read, and one that it wrote.

They bring torch and are not part of `.[test]`: `pip install -e .[export-test]` in a
separate environment.
"""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from models.huggingface.configs import llama_config, llama_dict, read_shape
from models.huggingface.folders import write_folder
from models.huggingface.tensors import from_huggingface, to_huggingface
from models.nets.llama import Llama
from models.nets.shapes import LlamaConfig
from pallas_kernels.operands import Fp4, Operand, Row, Tensor
from tcfp_jax.conversion import convert_to_tcfp
from tcfp_jax.inference import safetensors
from tcfp_jax.inference.compressed_tensors import load_compressed, save_compressed
from tcfp_jax.inference.shared_scales import quantize_together
from tcfp_jax.weights.fp4_packing import quantize_fp4
from tcfp_jax.weights.stored import Stored
from tests.helpers import parametrize
from tests.models.record_transformers import FILE, weights_of

REASON = (
    "compressed-tensors brings torch; install .[export-test] in an environment of"
    " its own"
)
torch = pytest.importorskip("torch", reason=REASON)
files = pytest.importorskip("safetensors.torch", reason=REASON)
peer = pytest.importorskip("compressed_tensors.quantization", reason=REASON)
scales = pytest.importorskip("compressed_tensors.quantization.utils", reason=REASON)
compressors = pytest.importorskip("compressed_tensors.compressors", reason=REASON)
transformers = pytest.importorskip("transformers", reason=REASON)

# Flax's norms promote bfloat16; warnings are of other packages.
pytestmark = [
    pytest.mark.usefixtures("standard_promotion"),
    pytest.mark.filterwarnings("ignore"),
]

CONFIG = LlamaConfig(
    layers=2, width=64, heads=2, kv_heads=1, hidden=96, context=16, head="untied"
)
TOKENS = np.arange(12)[None] * 7 % 256
SCALINGS = [
    Fp4(),
    Fp4(rule="one_level"),
    Fp4(tile="square"),
    Fp4("mxfp4"),
    Tensor(),
    Row(),
]


@pytest.fixture(scope="module")
def llama():
    return jax.jit(Llama(CONFIG, "float32").init)(
        jax.random.key(0), jnp.zeros((1, 4), jnp.int32)
    )["params"]


def bits(x):
    """A torch tensor or an array as float32's bits."""
    x = (
        x.detach().float().numpy()
        if isinstance(x, torch.Tensor)
        else np.asarray(x, np.float32)
    )
    return x.view(np.uint32)


def decoded(folder, name):
    """A weight as the package decodes it: bfloat16 of FP4, float32 of FP8."""
    config = peer.QuantizationConfig.model_validate(
        json.loads((folder / "config.json").read_text())["quantization_config"]
    )
    (scheme,) = config.config_groups.values()
    held = files.load_file(folder / "model.safetensors")
    part = {
        key.removeprefix(f"{name}."): value
        for key, value in held.items()
        if key.startswith(f"{name}.")
    }
    return compressors.BaseCompressor.get_value_from_registry(scheme.format).decompress(
        part, scheme
    )["weight"]


@parametrize("scaling", SCALINGS, ids=str)
def test_the_package_decodes_a_weight_to_the_same_bits(tmp_path, scaling, llama):
    tensors = to_huggingface(llama, CONFIG, scaling)
    save_compressed(tmp_path, tensors, config=llama_dict(CONFIG))
    for name in ("model.layers.0.self_attn.k_proj", "model.layers.1.mlp.down_proj"):
        operand = tensors[f"{name}.weight"]
        theirs = decoded(tmp_path, name)
        exact = np.asarray(operand.dequantize())
        if operand.outer is not None:
            # Their arithmetic is number * (scale / global), ours number * (scale *
            # outer): the same but for the rounding of an inverse, which the two rounded
            # to bfloat16 seldom show.
            held = files.load_file(tmp_path / "model.safetensors")
            inverse = held[f"{name}.weight_global_scale"].numpy()
            plain = Operand(
                operand.values,
                operand.scale,
                scaling=operand.scaling,
                outer=jnp.float32(1),
            )
            scale = np.asarray(plain.scale_of_values()) / inverse
            numbers = np.asarray(plain.dequantize()) / np.asarray(
                plain.scale_of_values()
            )
            assert_allclose(numbers * scale, exact, rtol=2**-22)
            exact = numbers * scale
        wanted = exact.astype(ml_dtypes.bfloat16) if isinstance(scaling, Fp4) else exact
        assert_array_equal(bits(theirs), bits(wanted))
        back = load_compressed(tmp_path)[0][f"{name}.weight"].forward
        assert_array_equal(np.asarray(back.values), np.asarray(operand.values))


def floats_of(tensor, dtype):
    """Return a tensor of a folder as an array; a quantized one has this dtype."""
    if not isinstance(tensor, Stored):
        return tensor
    return tensor.forward.dequantize(dtype).astype(jnp.float32)


@parametrize("scaling", SCALINGS, ids=str)
def test_transformers_model_has_our_logits(tmp_path, scaling, llama):
    save_compressed(
        tmp_path,
        to_huggingface(llama, CONFIG, scaling, jnp.float32),
        config=llama_dict(CONFIG, "float32"),
    )
    asked = transformers.CompressedTensorsConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, quantization_config=asked
    )
    with torch.no_grad():
        theirs = model(torch.tensor(TOKENS)).logits.numpy()
    found, config = load_compressed(tmp_path)
    # The package gives FP4 weights in bfloat16, which holds number * scale but rounds
    # the product with the outer.
    dtype = jnp.bfloat16 if isinstance(scaling, Fp4) else jnp.float32
    plain = {name: floats_of(tensor, dtype) for name, tensor in found.items()}
    ours = Llama(llama_config(config), "float32").apply(
        from_huggingface(plain, CONFIG), TOKENS
    )
    assert float(theirs.std()) > 0.05
    assert_allclose(np.asarray(ours), theirs, atol=2e-6)
    if isinstance(scaling, Fp4) and scaling == Fp4(scaling.format):
        # W4A16: our products read the codes of the file and activations in bfloat16.
        model = convert_to_tcfp(
            Llama(CONFIG),
            scaling.format,
            jnp.asarray(TOKENS),
            include=("linear", "small"),
        )
        served = model.apply(from_huggingface(found, CONFIG), TOKENS)
        assert_allclose(np.asarray(served), theirs, atol=0.05 * theirs.std())
    other = Llama(CONFIG, "float32").apply({"params": llama}, TOKENS)
    if isinstance(scaling, Fp4):  # the weights are quantized indeed
        assert abs(np.asarray(other) - theirs).max() > 0.1 * theirs.std()


@parametrize("form", ["bf16", "fp8", "nvfp4"])
@parametrize("case", ["llama", "qwen3", "gemma", "gemma3_text"])
def test_transformers_loads_exported_folders(tmp_path, case, form):
    recorded = json.loads(FILE.read_text())[case]
    (tmp_path / "config.json").write_text(json.dumps(recorded["config"]))
    config = read_shape(tmp_path)
    arrays = weights_of(recorded["shapes"])
    params = from_huggingface(arrays, config)["params"]
    write_folder(
        tmp_path / "out", params, config, form, source=tmp_path, tokenizer=None
    )
    asked = {}
    if form != "bf16":
        dequantize = transformers.CompressedTensorsConfig(dequantize=True)
        asked["quantization_config"] = dequantize
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, attn_implementation="eager", **asked
    )
    with torch.no_grad():
        theirs = model(torch.tensor(TOKENS)).logits.numpy()
    if form == "bf16":
        _, found, _ = safetensors.read(tmp_path / "out", "float")
    else:
        found, _ = load_compressed(tmp_path / "out")
    dtype = jnp.bfloat16 if form == "nvfp4" else jnp.float32
    plain = {name: floats_of(tensor, dtype) for name, tensor in found.items()}
    ours = Llama(read_shape(tmp_path / "out"), "float32").apply(
        from_huggingface(plain, config), TOKENS
    )
    assert_allclose(np.asarray(ours), theirs, atol=1e-4 * theirs.std())


@parametrize("preset, format", [("NVFP4A16", "nvfp4"), ("MXFP4A16", "mxfp4")])
def test_a_file_of_the_package_is_read(tmp_path, preset, format):
    """Its own compressor wrote it with its own scales, as llm-compressor does."""
    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    scheme = peer.preset_name_to_scheme(preset, ["Linear"])
    blocks = weight.reshape(32, -1, scheme.weights.group_size)
    shared = (
        scales.generate_gparam(weight.min(), weight.max())
        if format == "nvfp4"
        else None
    )
    scale, _ = scales.calculate_qparams(
        blocks.amin(-1), blocks.amax(-1), scheme.weights, global_scale=shared
    )
    if format == "mxfp4":
        scale = (
            scale.float()
            if scale.dtype != torch.uint8
            else torch.exp2(scale.float() - 127)
        )
    state = {"weight": weight, "weight_scale": scale} | (
        {} if shared is None else {"weight_global_scale": shared}
    )
    compressor = compressors.BaseCompressor.get_value_from_registry(
        f"{format}-pack-quantized"
    )
    packed = compressor.compress(state, scheme)
    files.save_file(
        {f"up_proj.{name}": tensor.contiguous() for name, tensor in packed.items()},
        tmp_path / "model.safetensors",
    )
    config = peer.QuantizationConfig(
        config_groups={"group_0": scheme}, format=f"{format}-pack-quantized"
    )
    (tmp_path / "config.json").write_text(
        json.dumps({"quantization_config": json.loads(config.model_dump_json())})
    )
    operand = load_compressed(tmp_path)[0]["up_proj.weight"].forward
    assert operand.scaling == Fp4(format)
    theirs = compressor.decompress(packed, scheme)["weight"].float().numpy()
    assert_allclose(np.asarray(operand.dequantize()), theirs, rtol=2**-8)
    # A weight that is written again has the package's bytes.
    save_compressed(tmp_path / "again", {"up_proj.weight": operand})
    again = files.load_file(tmp_path / "again/model.safetensors")
    for name, tensor in packed.items():
        assert torch.equal(
            again[f"up_proj.{name}"].view(torch.uint8),
            tensor.contiguous().view(torch.uint8),
        ), name


def test_the_package_reads_zeros_and_gives_them_our_scale(tmp_path):
    save_compressed(tmp_path, {"up_proj.weight": quantize_fp4(jnp.zeros((32, 64)))})
    assert not decoded(tmp_path, "up_proj").any()
    shared = files.load_file(tmp_path / "model.safetensors")[
        "up_proj.weight_global_scale"
    ]
    assert shared == scales.generate_gparam(torch.zeros(()), torch.zeros(())) == 1


def test_the_package_shares_the_scale_that_we_share():
    """llm-compressor gives fused layers their largest scale, and so do we."""
    parts = {
        name: np.random.default_rng(seed).standard_normal((16, 32)).astype(np.float32)
        for seed, name in enumerate(("q", "k"))
    }
    ours = quantize_together({name: jnp.asarray(w) for name, w in parts.items()}, Fp4())
    both = torch.tensor(np.concatenate(list(parts.values())))
    assert_allclose(
        float(ours["q"].outer),
        1 / scales.generate_gparam(both.min(), both.max()).item(),
        rtol=2**-22,
    )
