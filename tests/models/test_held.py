"""Runs whose folders are read, and written, layer by layer."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tcfp_jax
from models.huggingface.configs import llama_config, read_shape
from models.huggingface.folders import read_folder
from models.huggingface.held import Matrices
from models.huggingface.tensors import held_variables, to_huggingface
from models.nets.adapters import adapters_of, adapting, frozen, is_adapter, joined
from models.nets.meshes import make_mesh, parse_mesh
from models.training import exporting, steps
from models.training.data import Data
from models.training.forms import Adapters, Stored
from models.training.learners import learner_of
from models.training.parameters import read_parameters
from models.training.running import run
from models.training.settings import TrainConfig
from models.training.state import ROUNDING, float_parameters
from models.training.steps import batch_key, init, make_train_step
from tcfp_jax import layer_state
from tcfp_jax.inference import safetensors
from tcfp_jax.paths import entries, path_names
from tests.helpers import parametrize, refused, same_bits, slow, slow_except
from tests.models.record_transformers import FILE, weights_of

pytestmark = pytest.mark.usefixtures("standard_promotion")
RECORDED = json.loads(FILE.read_text())
TEXT = jnp.asarray(np.random.default_rng(0).integers(0, 250, 4096), jnp.int32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Qwen3 in BF16, in three files and an index."""
    made = tmp_path_factory.mktemp("qwen3")
    recorded = RECORDED["qwen3"]
    arrays = weights_of(recorded["shapes"])
    places = {}
    for part in range(3):
        names = sorted(arrays)[part::3]
        file = f"model-{part + 1:05}-of-00003.safetensors"
        places |= dict.fromkeys(names, file)
        held = {name: arrays[name].astype(jnp.bfloat16) for name in names}
        safetensors.write(made / file, held, {"format": "pt"})
    (made / safetensors.INDEX).write_text(json.dumps(dict(weight_map=places)))
    (made / safetensors.CONFIG).write_text(json.dumps(recorded["config"]))
    return made


def run_of(folder, **changes):
    run = TrainConfig(
        model=dataclasses.replace(read_shape(folder), remat="none"),
        recipe="tcfp12_single",
        weights=Stored("8bit", "backward"),
        steps=2,
        steps_per_call=2,
        learning_rate=1e-3,
        batch=2,
        sequence=8,
        start=str(folder),
    )
    return dataclasses.replace(run, **changes)


def floats_of(config):
    """The parameters of the folder, float32, all at once."""
    shapes = jax.eval_shape(
        lambda: steps.init(dataclasses.replace(config.in_bf16, start=None)).params
    )
    return read_folder(Path(config.start), shapes, config.size)


def stored_at_once(config):
    """The parameters of a run, from `store` of the tree of all floats."""
    own = steps.program(config)
    rounding = jax.random.fold_in(jax.random.key(config.seed), ROUNDING)

    @jax.jit
    def made(floats):
        weights = learner_of(own).weights
        return tcfp_jax.store(
            floats, weights, key=rounding, gradient_dtype=jnp.bfloat16
        )

    return made(jax.tree.map(jnp.asarray, floats_of(config)))


def test_layers_that_are_read_one_by_one_have_the_bits_of_a_whole_tree(
    folder, monkeypatch
):
    config = run_of(folder)
    reads = []
    read = safetensors.Held.__getitem__
    others = jax.live_arrays()
    known = {id(array) for array in others}

    def watched(held, name):
        reads.append(name)
        for array in jax.live_arrays():
            is_stack = array.ndim == 3 and array.shape[0] == config.size.layers
            assert (
                not is_stack or id(array) in known or array.dtype == jnp.float8_e4m3fn
            )
        return read(held, name)

    with monkeypatch.context() as patch:
        patch.setattr(safetensors.Held, "__getitem__", watched)
        params = init(config).params
    assert sorted(reads) == sorted(RECORDED["qwen3"]["shapes"])
    at_once = stored_at_once(config)
    assert jax.tree.structure(params) == jax.tree.structure(at_once)
    assert same_bits(params, at_once)


FORMS = {
    "stored": dict(),
    "adapters": dict(recipe="tensorwise", weights=Adapters(4)),
}


@slow_except("stored")
@parametrize("form", FORMS)
def test_layers_that_are_written_one_by_one_have_the_bits_of_a_whole_tree(
    folder, tmp_path, monkeypatch, form
):
    """A device holds no stack of floats, and adapters are part of the weights."""
    config = run_of(folder, **FORMS[form])
    state = init(config)
    if form == "adapters":

        def moved(path, leaf):
            own = jax.random.key(leaf.size)
            return jax.random.normal(own, leaf.shape) if is_adapter(path) else leaf

        params = jax.tree_util.tree_map_with_path(moved, state.params)
        state = state._replace(params=params)
    known = {id(array) for array in jax.live_arrays()}
    stacks = []

    def watched(*arguments):
        for array in jax.live_arrays():
            is_stack = array.ndim == 3 and array.shape[0] == config.size.layers
            if is_stack and id(array) not in known:
                stacks.append(array.shape)
        return layer(*arguments)

    layer = exporting.Trained.__getitem__
    monkeypatch.setattr(exporting.Trained, "__getitem__", watched)
    exporting.Export(tmp_path / "new").write(config, state)
    exporting.Export(tmp_path / "new.npz").write(config, state)
    assert stacks == []
    whole = float_parameters(state.params, tcfp_jax.layer_state(state.opt_state))
    found = read_parameters(tmp_path / "new.npz", whole)
    assert same_bits(found, whole)
    if form == "adapters":
        return
    tensors = to_huggingface(jax.device_get(whole), config.size)
    _, written, _ = safetensors.read(tmp_path / "new", "float")
    assert same_bits({name: written[name] for name in written}, tensors)


@slow
def test_a_run_has_the_losses_of_one_from_a_whole_tree(folder):
    config = run_of(folder, weights=Stored("8bit"))
    state = init(config)
    other = jax.tree.map(jnp.copy, state)._replace(params=stored_at_once(config))
    losses = []
    for begun in (state, other):
        step = make_train_step(config)
        _, found = step(begun, TEXT, batch_key(config))
        losses.append(found.tolist())
    assert losses[0] == losses[1]
    assert losses[0][1] < losses[0][0]


@slow
@parametrize("recipe", ["nvfp4", "tensorwise", "bf16"])
def test_frozen_layers_have_the_bits_of_a_whole_tree(folder, recipe):
    """And steps of their adapters do not change them."""
    config = run_of(folder, recipe=recipe, weights=Adapters(4))
    own = steps.program(config)
    key = jax.random.key(config.seed)

    @jax.jit
    def made(floats):
        adapters = adapters_of(steps._floats(own, key))
        weights = learner_of(own).weights
        return frozen(joined(floats, adapters), weights, steps._optimizer(own, key))

    at_once = made(jax.tree.map(jnp.asarray, floats_of(config)))
    state = init(config)
    assert same_bits((state.params, state.opt_state), at_once)
    before = jax.tree.map(jnp.copy, state)
    state, _ = make_train_step(config)(state, TEXT, batch_key(config))
    base, trained = map(divided, (before, state))
    assert same_bits(base[0], trained[0])
    assert not any(map(same_bits, base[1], trained[1]))


def divided(state):
    """The frozen arrays of a state, and the second factors of its adapters, which begin
    as zeros.
    """
    frozen = [layer_state(state.opt_state)]
    thin = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(state.params):
        if not is_adapter(path):
            frozen.append(leaf)
        elif path_names(path)[-1] == "b":
            thin.append(leaf)
    return frozen, thin


def test_matrices_that_stay_float_have_the_dtype_of_their_products():
    params = {
        "embedding": {"embedding": np.ones((4, 2), np.float32)},
        "final_norm": {"scale": np.ones(2, np.float32)},
        "layers": {
            "norm": {"scale": np.ones((3, 2), np.float32)},
            "up": {"kernel": np.ones((3, 2, 4), np.float32)},
            "up_adapter": {"a": np.ones((3, 2, 1), np.float32)},
        },
    }
    kept, _ = frozen(params, {}, adapting(optax.sgd(1.0)), jnp.bfloat16)
    dtypes = {path: leaf.dtype.name for path, leaf in entries(kept).items()}
    assert dtypes == {
        "embedding/embedding": "bfloat16",
        "final_norm/scale": "float32",
        "layers/norm/scale": "float32",
        "layers/up/kernel": "bfloat16",
        "layers/up_adapter/a": "float32",
    }


@slow
def test_devices_of_a_mesh_get_their_parts(folder):
    config = run_of(folder, batch=8, weights=Stored("float32"))
    mesh = make_mesh(parse_mesh("data=4,fsdp=2"))
    state = init(config, mesh)
    places = steps.state_places(steps.program(config), mesh)
    for array, place in zip(
        jax.tree.leaves(state), jax.tree.leaves(places), strict=True
    ):
        assert array.sharding.is_equivalent_to(place, array.ndim)
    assert same_bits(jax.device_get(state), jax.device_get(init(config)))


@parametrize(
    ("change", "message"),
    [
        (lambda array: array[:-1], "layers/down/kernel.*have the shapes"),
        (lambda array: array.at[3, 5].set(jnp.nan), "'layers/down/kernel' that are"),
        (lambda array: array.astype(jnp.int32), "is int32, which is none of"),
        (None, r"model: .*down_proj.weight is missing among.*; copy all files"),
    ],
)
def test_a_folder_of_another_model_leaves_no_run(folder, tmp_path, change, message):
    damaged = tmp_path / "model"
    shutil.copytree(folder, damaged)
    name = "model.layers.1.mlp.down_proj.weight"
    index = json.loads((folder / safetensors.INDEX).read_text())
    file = damaged / index["weight_map"][name]
    _, held, _ = safetensors.read(folder, "float")
    names = [one for one in held if index["weight_map"][one] == file.name]
    arrays = {one: jnp.asarray(held[one]) for one in names}
    if change is None:
        del arrays[name]
        del index["weight_map"][name]
        (damaged / safetensors.INDEX).write_text(json.dumps(index))
    else:
        arrays[name] = change(arrays[name])
    safetensors.write(file, arrays, {"format": "pt"})
    text = tmp_path / "text.txt"
    text.write_text("words and more words\n" * 400)
    data = Data((str(text),), corpus_bytes=2**63 - 1)
    with refused(message):
        run(run_of(damaged, data=data), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_matrices_are_read_when_they_are_used(folder):
    _, held, _ = safetensors.read(folder, "float")
    names = [f"model.layers.{layer}.mlp.up_proj.weight" for layer in range(3)]
    stack = Matrices(held, tuple(names), (3, 32, 48), True, True, "layers/up/kernel")
    assert stack[1].dtype == jnp.bfloat16
    assert same_bits(stack[1], held[names[1]].T)
    whole = np.asarray(stack)
    assert whole.dtype == np.float32
    assert same_bits(whole[2], held[names[2]].T.astype(np.float32))
    with refused("reading it is a copy"):
        np.asarray(stack, copy=False)


NORM = "model.layers.1.input_layernorm.weight"
MATRIX = "model.layers.1.mlp.up_proj.weight"


@parametrize(
    "name, change, message",
    [
        (NORM, np.ravel(1.0), r"attention_norm/scale is a stack.*'\(1,\)', '\(32,\)'"),
        (NORM, np.ones((1, 32)), "attention_norm/scale is a stack.*have the shapes"),
        (NORM, np.ones(32, int), "input_layernorm.weight is int64, which is none"),
        (MATRIX, np.ones(8), "up/kernel is a stack.*have the shapes"),
        ("model.x", np.ones(8), "'model.x'. are no tensors"),
    ],
)
def test_a_tensor_of_another_model_is_named_with_its_folder(name, change, message):
    recorded = RECORDED["qwen3"]
    arrays = {**weights_of(recorded["shapes"]), name: change}
    with refused(f"FOLDER: .*{message}"):
        held_variables(arrays, llama_config(recorded["config"]), "FOLDER")


def test_a_float64_beyond_float32_is_not_finite():
    recorded = RECORDED["qwen3"]
    arrays = weights_of(recorded["shapes"])
    arrays[MATRIX] = arrays[MATRIX].astype(np.float64)
    size = llama_config(recorded["config"])
    stack = held_variables(arrays, size, "FOLDER")["params"]["layers"]["up"]["kernel"]
    assert same_bits(stack[1], arrays[MATRIX].astype(np.float32).T)
    arrays[MATRIX][3, 5] = 1e39
    with refused("FOLDER has values in 'layers/up/kernel' that are not finite"):
        stack[1]


def test_adapters_need_a_recipe_that_stores_weights_or_bf16(folder):
    config = run_of(folder, recipe="bf16", weights=Adapters(2))
    steps.check_placement(config, None)
    config = run_of(folder, recipe="nvfp4_training", weights=Adapters(2))
    with refused("lora=2 with recipe 'nvfp4_training': .* it stores none"):
        steps.check_placement(config, None)
