"""Training on meshes and in several processes: the losses of one device, and
checkpoints that fit any mesh.
"""

import functools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from numpy.testing import assert_allclose

import tcfp_jax
from models import train
from models.nets.meshes import (
    AXES,
    BATCH,
    check_mesh,
    everywhere,
    looked_up,
    make_mesh,
    parameter_shardings,
    parameter_spec,
    parse_mesh,
)
from models.nets.shapes import LlamaConfig
from models.nets.sizes import LLAMAS
from models.train import TrainConfig, run
from models.training import processes, running
from models.training import steps as training
from models.training.checkpoint import RunDirectory
from models.training.forms import Stored
from models.training.settings import Data
from tcfp_jax.conversion import find_weights
from tcfp_jax.sharding import state_shardings
from tests.collectives import collectives
from tests.helpers import mesh_of, normal, parametrize, refused, same_bits, slow

pytestmark = pytest.mark.usefixtures("standard_promotion")
ROOT = Path(__file__).parents[2]
# The smallest size that two devices can split along each axis without cutting a block
# of 128 values.
MICRO = LlamaConfig(layers=1, width=256, heads=4, kv_heads=2, hidden=256, context=16)
FLOAT = TrainConfig(
    model=MICRO,
    recipe="tcfp12",
    steps=6,
    batch=8,
    sequence=16,
    steps_per_call=2,
    heldout_windows=8,
    data=Data(corpus_bytes=200_000),
)
STORED = replace(FLOAT, recipe="tcfp12_single", weights=Stored("8bit"))
CONFIGS = {"float": FLOAT, "stored": STORED}
# A sum over devices has another order, which moves some values to the other neighbour
# in FP8.
CLOSE = 0.01


def trained(config, mesh, state=None, count=6):
    """Return the state after `count` steps, and their losses."""
    text = everywhere(running.corpus_of(config).train, mesh)
    state = training.init(config, mesh) if state is None else state
    state, losses = training.make_train_step(config, count, mesh)(
        state, text, training.batch_key(config)
    )
    return state, np.asarray(losses)


MESHES = {"float": "data=2,fsdp=2,tensor=2", "stored": "data=4,fsdp=2"}


@functools.lru_cache
def on_one_device(name):
    return trained(CONFIGS[name], None)


@functools.lru_cache
def on_mesh(name):
    return trained(CONFIGS[name], make_mesh(parse_mesh(MESHES[name])))


@slow
@parametrize("name", CONFIGS)
def test_a_mesh_has_the_losses_of_one_device(name):
    _, expected = on_one_device(name)
    state, losses = on_mesh(name)
    assert_allclose(losses[:2], expected[:2], rtol=1e-5)
    assert_allclose(losses, expected, rtol=CLOSE)
    assert losses[-1] < losses[0] - 1
    kernel = state.params["layers"]["down"]["kernel"]
    # Every matrix and every array made of it is split: no device holds a whole array of
    # its size.
    whole = [
        jax.tree_util.keystr(path)
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
        if leaf.size >= MICRO.width * MICRO.width // 2
        and leaf.sharding.is_fully_replicated
    ]
    assert not whole
    assert not jax.tree.leaves(kernel)[0].sharding.is_fully_replicated


@slow
@parametrize("name", CONFIGS)
def test_a_checkpoint_of_a_mesh_is_restored_on_another(tmp_path, name):
    """Also with the rests of a save that was interrupted, which are not the newest
    checkpoint.
    """
    config = CONFIGS[name]
    state, _ = on_mesh(name)
    with RunDirectory(tmp_path / "run", config, "digest", resume="never") as directory:
        directory.append(1, np.ones(4))
        directory.save(state, 4)
    kept = tmp_path / "run/checkpoints"
    partial = kept / "6.orbax-checkpoint-tmp"
    shutil.copytree(kept / "4", partial)
    shutil.rmtree(next(path for path in partial.rglob("*") if path.name == "d"))
    for sizes in (
        {"fsdp": 2, "data": 4},
        {"fsdp": 4, "tensor": 2} if name == "float" else {"data": 8},
        None,
    ):
        mesh = None if sizes is None else make_mesh(sizes)
        with RunDirectory(
            tmp_path / "run", config, "digest", resume="allowed"
        ) as directory:
            restored, losses = directory.restore(training.init(config, mesh))
        assert len(losses) == 4
        assert same_bits(restored, state)
        if mesh is not None:
            assert all(
                leaf.sharding.mesh == mesh
                for leaf in jax.tree.leaves(restored.params["embedding"])
            )
    other = replace(config, model=replace(MICRO, layers=2))
    with refused("layers=1 in the folder but 2 now"):
        RunDirectory(tmp_path / "run", other, "digest", resume="allowed")


ARGUMENTS = (
    "--model=micro-llama",
    "--recipe=tcfp12",
    "--compare=none",
    "--batch=8",
    "--sequence=16",
    "--steps-per-call=2",
    "--heldout-windows=8",
    "--corpus-bytes=200000",
)


def free_port():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def start_two(out, *arguments, each=((), ()), launcher="options"):
    """Start two processes of two devices each, with `launcher`."""
    port = free_port()
    environment = {
        **os.environ,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "JAX_PLATFORMS": "cpu",
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        "PYTHONPATH": str(ROOT),
        "JAX_NUMPY_DTYPE_PROMOTION": "standard",
    }
    command = [
        sys.executable,
        "-m",
        "tests.models.test_distributed",
        *ARGUMENTS,
        f"--out={out}",
        *arguments,
    ]
    started = []
    for i, own in enumerate(each):
        told = {}
        if launcher == "SLURM":
            told = {
                "SLURM_JOB_ID": "7",
                "SLURM_STEP_NODELIST": "localhost",
                "SLURM_NTASKS": "2",
                "SLURM_PROCID": str(i),
            }
            # JAX derives the port from the number of the job.
            told |= {
                "SLURM_LOCALID": str(i),
                "SLURM_STEP_NUM_NODES": "1",
                "JAX_COORDINATOR_PORT": str(port),
            }
        else:
            own = (
                *own,
                f"--coordinator=localhost:{port}",
                "--processes=2",
                f"--process={i}",
            )
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(
            subprocess.Popen(
                [*command, *own], cwd=ROOT, env={**environment, **told}, **pipes
            )
        )
    return started


def finish(started, timeout=240):
    """Return (status, output, errors) of each process."""
    try:
        texts = [process.communicate(timeout=timeout) for process in started]
        return [
            (process.returncode, *text)
            for process, text in zip(started, texts, strict=True)
        ]
    finally:
        for process in started:
            process.kill()


def losses_of(out):
    return [
        json.loads(line)["loss"]
        for line in (out / "metrics.jsonl").read_text().splitlines()
    ]


def restored_on(mesh, out, config):
    """Return the newest checkpoint of a folder, on a mesh."""
    with RunDirectory(
        out, config, running.corpus_of(config).digest, resume="allowed"
    ) as directory:
        return directory.restore(training.init(config, mesh))[0]


@slow
def test_two_processes_train_as_one_and_one_continues(tmp_path, monkeypatch):
    """SLURM starts them: the first process writes and prints, and the losses equal
    those of one device.
    """
    out = tmp_path / "run"
    two = start_two(
        out,
        "--mesh=data=2,fsdp=2",
        "--steps=6",
        "--checkpoint-every=2",
        launcher="SLURM",
    )
    _, expected = on_one_device("float")
    (status, printed, shown), (other_status, other_printed, other_shown) = finish(two)
    assert (status, other_status) == (0, 0), shown + other_shown
    assert "on 4 x cpu (data=2, fsdp=2) in 2 process(es)" in printed
    assert "per token" in printed
    assert "100%" in shown
    assert "micro-llama" not in other_printed
    assert "loss" not in other_printed + other_shown
    assert_allclose(losses_of(out)[:2], expected[:2], rtol=1e-5)
    assert_allclose(losses_of(out), expected, rtol=CLOSE)
    assert json.loads((out / "summary.json").read_text())["run"]["heldout_loss"] > 0

    # One process goes on, on one device and on eight.
    monkeypatch.setitem(LLAMAS, "micro-llama", MICRO)
    config = replace(FLOAT, model="micro-llama")
    places = None, make_mesh(parse_mesh(MESHES["float"]))
    states = [restored_on(place, out, config) for place in places]
    assert same_bits(*states)
    assert int(states[0].step) == 6
    (_, losses), (_, on_eight) = map(functools.partial(trained, FLOAT), places, states)
    assert_allclose(on_eight[:2], losses[:2], rtol=1e-4)
    assert losses[0] < expected[0] - 1


@slow
@parametrize(
    "lost, by", [(0, signal.SIGKILL), (1, signal.SIGSTOP)], ids=["killed", "silent"]
)
def test_a_lost_process_ends_the_other_and_leaves_a_checkpoint(
    tmp_path, monkeypatch, lost, by
):
    """A process is lost within a save: a killed one closes its connections, a silent
    one is noticed later.
    """
    out = tmp_path / "run"
    two = start_two(
        out,
        "--mesh=data=2,fsdp=2",
        "--recipe=bf16",
        "--steps=10000",
        "--checkpoint-every=2",
        "--heartbeat-timeout=10",
    )
    try:
        deadline = time.monotonic() + 240
        while not any(
            "tmp" in path.name and path.name[0] != "2"
            for path in (out / "checkpoints").glob("*")
        ):
            assert all(process.poll() is None for process in two), (
                "a process ended before it could be killed"
            )
            assert time.monotonic() < deadline, "the run did not get far enough"
            time.sleep(0.002)
        two[lost].send_signal(by)
        two[1 - lost].wait(timeout=120)
    finally:
        two[lost].kill()
        found = finish(two)
    status, _, errors = found[1 - lost]
    assert status not in (0, -signal.SIGKILL)
    assert re.search(
        "another process was lost|JAX distributed service detected fatal errors", errors
    ), errors
    monkeypatch.setitem(LLAMAS, "micro-llama", MICRO)
    state = restored_on(
        None,
        out,
        replace(FLOAT, model="micro-llama", recipe="bf16", steps=10000),
    )
    assert int(state.step) >= 2
    assert int(state.step) % 2 == 0
    assert len(losses_of(out)) == int(state.step)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.params))


@slow
def test_processes_with_other_settings_end_before_the_first_step(tmp_path):
    two = start_two(
        tmp_path / "run",
        "--steps=6",
        each=(("--seed=0",), ("--seed=1", "--learning-rate=0.5")),
    )
    for status, _, errors in finish(two):
        assert status == 2
        assert re.search(
            r"config\.seed=0 in process 0 but 1 in process 1.*start all with the same",
            errors,
        ), errors
        assert "config.learning_rate=0.003 in process 0 but 0.5 in process 1" in errors
    assert not (tmp_path / "run").exists()


def test_what_one_process_lacks_ends_both(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("A page. " * 2000)
    two = start_two(
        tmp_path / "run",
        each=((f"--data={text}",), (f"--data={tmp_path / 'absent.txt'}",)),
    )
    (status, _, errors), (other_status, _, other_errors) = finish(two)
    assert (status, other_status) == (2, 2)
    assert "process 1 of 2 cannot go on: FileNotFoundError: data" in errors
    assert "does not exist" in other_errors
    assert not (tmp_path / "run").exists()


SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
}


@pytest.fixture
def started(monkeypatch):
    """Record the arguments of `jax.distributed.initialize`."""
    calls = []
    monkeypatch.setattr(
        jax.distributed,
        "initialize",
        lambda *args, **options: calls.append((args, options)),
    )
    for name in [name for name in os.environ if name.startswith(("SLURM_", "OMPI_"))]:
        monkeypatch.delenv(name)
    return calls


@parametrize(
    "environment, arguments, expected",
    [
        ({}, (), []),
        (dict(SLURM, SLURM_NTASKS="1"), (), []),
        # within an allocation, but not started by srun
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8"}, (), []),
        (SLURM, (), [(None, None, None)]),
        (
            {
                "OMPI_MCA_orte_hnp_uri": "1.0;tcp://10.0.0.1:1",
                "OMPI_COMM_WORLD_SIZE": "2",
            },
            (),
            [(None, None, None)],
        ),
        ({}, ("node1:1234", 2, 1), [("node1:1234", 2, 1)]),
    ],
)
def test_processes_are_started_as_the_environment_says(
    monkeypatch, started, environment, arguments, expected
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    processes.start(*arguments, heartbeat_timeout_seconds=7)
    assert started == [(args, {"heartbeat_timeout_seconds": 7}) for args in expected]


@parametrize(
    "environment, arguments, message",
    [
        (
            {},
            ("node1:1234",),
            (
                "--coordinator without --processes, --process, and neither SLURM nor"
                " Open MPI"
            ),
        ),
        ({}, (None, 2, 0), "--processes, --process without --coordinator"),
        ({}, ("node1", 2, 0), "--coordinator node1 has no port; write host:port"),
        ({}, ("node1:1", 2, 2), "--process 2 of --processes 2; they count from 0"),
        ({}, ("node1:1", 0, 0), "--processes 0 must be at least 1"),
        (
            {"OMPI_COMM_WORLD_SIZE": "4"},
            (),
            "Open MPI started 4 processes, but says nothing of where the first",
        ),
    ],
)
def test_what_cannot_be_started_is_named(
    monkeypatch, started, environment, arguments, message
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with refused(message):
        processes.start(*arguments)
    assert not started


@parametrize(
    "text, message",
    [
        (
            "data=2,model=4",
            r"axis 'model', which is unknown; use axes of \['data', 'fsdp', 'tensor'\]",
        ),
        ("data", "has the part 'data'; write sizes of axes"),
        ("data=2,data=4", "names the axis 'data' twice"),
        ("fsdp=0", "fsdp=0; every axis has a size of at least 1"),
        (
            "data=2,fsdp=2",
            "data=2 x fsdp=2 is of 4 devices, but there are 8 .*such as fsdp=8",
        ),
    ],
)
def test_meshes_that_are_none(text, message):
    with refused(message):
        make_mesh(parse_mesh(text))


@parametrize(
    "sizes, change, message",
    [
        (
            "fsdp=8",
            {"batch": 12},
            "data=1 times fsdp=8 does not divide batch=12, .*; use batch=16",
        ),
        (
            "tensor=8",
            {},
            "tensor=8 does not divide heads=4, which it splits; choose a divisor",
        ),
        ("data=2,tensor=4", {}, "tensor=4 does not divide kv_heads=2"),
        (
            "fsdp=8",
            {"model": replace(MICRO, width=52, heads=2)},
            r"fsdp=8 does not divide axis . of .* \[.*52.*\], which it splits",
        ),
        (
            "fsdp=4,tensor=2",
            {"recipe": "tcfp12_single", "weights": Stored("8bit")},
            "blocks of 128",
        ),
    ],
)
def test_a_mesh_that_does_not_divide_a_run_leaves_no_folder(
    tmp_path, sizes, change, message
):
    with refused(message):
        run(
            replace(FLOAT, **change),
            mesh=make_mesh(parse_mesh(sizes)),
            out=tmp_path / "run",
        )
    assert not (tmp_path / "run").exists()


def test_a_mesh_without_an_axis_is_refused():
    mesh = mesh_of(8, names=("fsdp",))
    with refused(
        r"has the axes \['fsdp'\].*\['data', 'tensor'\] is missing; make the"
        r" mesh by"
    ):
        run(FLOAT, mesh=mesh)
    check_mesh(make_mesh({"fsdp": 8}), batch=8, heads={})


@parametrize("model", ["tiny", "llama-tiny", "llama-8b"])
def test_every_parameter_has_its_place(model):
    config = train.preset(model)
    params = jax.eval_shape(lambda: training.init(config.in_bf16)).params
    places = jax.tree.leaves(
        parameter_shardings(params, make_mesh({"data": 2, "fsdp": 2, "tensor": 2}))
    )
    for leaf, place in zip(jax.tree.leaves(params), places, strict=True):
        assert (
            leaf.ndim < 2 or min(leaf.shape) == config.size.layers
        ) or place.spec != P()


def largest_sent(compiled):
    """Return the size of the largest array that devices send."""
    found = collectives(compiled.as_text())
    return max(part.size for one in found for part in one.parts)


def test_a_lookup_sends_what_is_looked_up_and_not_the_table():
    table = normal(0, (512, 64))
    tokens = random.randint(random.key(1), (8, 4), 0, 512)
    weights = normal(2, (8, 4, 64))

    def loss(table, look):
        return (weights * look(table)).sum()

    exact = jax.value_and_grad(loss)(
        table, lambda table: table[tokens].astype(jnp.bfloat16)
    )
    mesh = mesh_of(1, 4, 1, names=AXES)
    split = NamedSharding(mesh, P("tensor", "fsdp"))
    with jax.set_mesh(mesh):
        step = jax.jit(
            jax.value_and_grad(
                lambda table, tokens: loss(
                    table, lambda table: looked_up(table, tokens, jnp.bfloat16)
                )
            ),
            out_shardings=(NamedSharding(mesh, P()), split),
        )
        placed = (
            jax.device_put(table, split),
            jax.device_put(tokens, NamedSharding(mesh, BATCH)),
        )
        compiled = step.lower(*placed).compile()
        got = compiled(*placed)
    assert np.allclose(exact[0], got[0], rtol=1e-5)
    assert np.allclose(exact[1], got[1], atol=1e-6)
    assert largest_sent(compiled) <= tokens.size * table.shape[1] < table.size // 4


def test_a_lookup_in_a_stored_table_sends_what_is_looked_up():
    table = normal(0, (512, 64))
    tokens = random.randint(random.key(1), (8, 4), 0, 512)
    low = tcfp_jax.transform(
        lambda params, tokens: looked_up(params["e"], tokens, jnp.bfloat16),
        "tcfp12_single",
        include="embed",
    )
    stored = tcfp_jax.store(
        {"e": table}, find_weights(low, {"e": table}, tokens), key=random.key(2)
    )
    weights = normal(3, (8, 4, 64))
    step = tcfp_jax.value_and_grad(
        lambda params, tokens: (weights * low(params, tokens)).sum()
    )
    exact = jax.jit(step)(stored, tokens)
    mesh = mesh_of(1, 2, 2, names=AXES)
    split = NamedSharding(mesh, P("tensor", "fsdp"))
    places = state_shardings({"e": split}, stored)
    with jax.set_mesh(mesh):
        placed = (
            jax.device_put(stored, places),
            jax.device_put(tokens, NamedSharding(mesh, BATCH)),
        )
        compiled = (
            jax.jit(step, out_shardings=(NamedSharding(mesh, P()), {"e": split}))
            .lower(*placed)
            .compile()
        )
        got = compiled(*placed)
    assert np.allclose(exact[0], got[0], rtol=1e-5)
    assert same_bits(exact[1], jax.device_get(got[1]))
    assert largest_sent(compiled) <= tokens.size * table.shape[1]


def test_a_parameter_without_a_rule_is_named():
    assert parameter_spec("layers/down/kernel", 3) == P(None, ("tensor", "fsdp"), None)
    with refused("no rule says where the parameter layers/mixer/kernel lies"):
        parameter_spec("layers/mixer/kernel", 3)


if __name__ == "__main__":
    LLAMAS["micro-llama"] = MICRO
    sys.exit(train.main(sys.argv[1:]))
