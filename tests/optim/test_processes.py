"""Twenty steps on stored weights in two processes of two devices have the bits of one
process with one device.
"""

import os
import pickle
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import tcfp_jax
from tests.helpers import slow, step_of

ROOT = Path(__file__).parents[2]
STEPS = 20
SHAPE = (64, 256)


def train(place):
    """Return parameters and the optimizer's state after some steps with equal
    gradients; `place` distributes arrays, which are the same in every process.
    """
    kernel, gradient = (
        place(np.random.default_rng(seed).normal(size=SHAPE).astype(np.float32))
        for seed in range(2)
    )
    tx = tcfp_jax.optim.adamw(
        1e-2, weight_decay=0.1, moments="8bit", key=jax.random.key(1)
    )
    step = step_of(tx)

    @jax.jit
    def run(kernel, gradient):
        params = tcfp_jax.store(
            {"kernel": kernel / 8}, "tcfp12_single", key=jax.random.key(0)
        )

        def one(carry, _):
            return step({"kernel": gradient}, *carry), None

        return jax.lax.scan(one, (params, tx.init(params)), length=STEPS)[0]

    return run(kernel, gradient)


def bytes_of_parts(tree):
    """(path, where it begins, its bytes) of every part that this process has."""
    found = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        for shard in leaf.addressable_shards:
            begins = [part.start or 0 for part in shard.index]
            found.append(
                (jax.tree_util.keystr(path), begins, np.asarray(shard.data).tobytes())
            )
    return found


def main(address: str, process: int, path: Path) -> None:
    """One of the two processes: write its parts into a file."""
    jax.distributed.initialize(address, num_processes=2, process_id=process)
    assert (jax.process_count(), jax.local_device_count()) == (2, 2)
    sharding = NamedSharding(jax.make_mesh((2, 2), ("a", "b")), P("a", "b"))

    def place(array):
        callback = array.__getitem__
        return jax.make_array_from_callback(array.shape, sharding, callback)

    path.write_bytes(pickle.dumps(bytes_of_parts(train(place))))


@slow
@pytest.mark.optimized
def test_two_processes_have_the_bits_of_one(tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    environment = dict(
        os.environ,
        XLA_FLAGS="--xla_force_host_platform_device_count=2",
        JAX_PLATFORMS="cpu",
        JAX_CPU_COLLECTIVES_IMPLEMENTATION="gloo",
        PYTHONPATH=str(ROOT),
    )
    command = [sys.executable, "-m", "tests.optim.test_processes", address]
    files = [tmp_path / str(i) for i in range(2)]
    started = [
        subprocess.Popen([*command, str(i), str(f)], cwd=ROOT, env=environment)
        for i, f in enumerate(files)
    ]
    try:
        assert [process.wait(timeout=240) for process in started] == [0, 0]
    finally:
        for process in started:
            process.kill()
    leaves = jax.tree_util.tree_flatten_with_path(train(jnp.asarray))[0]
    whole = {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}
    parts = []
    for file in files:
        parts.extend(pickle.loads(file.read_bytes()))
    assert {path for path, _, _ in parts} == set(whole)
    split = set()
    for path, begins, content in parts:
        array = whole[path]
        if len(content) != array.nbytes:
            split.add(path)
            row, column = begins
            rows = slice(row, row + SHAPE[0] // 2)
            array = array[rows, column : column + array.shape[1] // 2]
        assert content == array.tobytes(), path
    assert len(split) >= 4, split  # hi, lo and both moments are in parts


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
