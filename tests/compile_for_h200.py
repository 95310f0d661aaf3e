"""Compiling for an H200 on a machine without a GPU: the CUDA plugin needs a description of the device and ptxas.

`data/h200.txtpb` is what XLA itself writes of an H200 (`XLA_FLAGS=--xla_dump_to=DIR`, `*.gpu_target_config.pbtxt`). Nothing is
autotuned this way, so what XLA would choose between Triton and cuBLASLt on the device does not show.
"""

import functools
import importlib.util
import os
import shutil
import struct
from pathlib import Path

import jax
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

TARGET = Path(__file__).parent / "data" / "h200.txtpb"
# Sections `.nv.info.KERNEL` of a cubin are records (format, attribute, value); 0x1e04 is the kernel's stack frame in bytes.
_NV_INFO_SIZED, _FRAME_SIZE = 0x04, 0x11


def reason_to_skip() -> str | None:
    """What this machine lacks, or None."""
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        return "compiling for an H200 needs the jax-cuda13-plugin and jax-cuda13-pjrt wheels"
    if shutil.which("ptxas") is None:
        return "compiling for an H200 needs ptxas of CUDA 13 on the PATH"
    return None


@functools.lru_cache(maxsize=1)
def mesh() -> Mesh:
    """One H200 that is not there."""
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    os.environ.setdefault("MOSAIC_GPU_CUDA_ROOT", str(Path(shutil.which("ptxas")).resolve().parents[1]))
    jax.devices()
    h200 = topologies.get_topology_desc(platform="cuda", target_config=TARGET.read_text(), topology="1x1x1")
    return topologies.make_mesh(topo=h200, mesh_shape=(1,), axis_names=("x",))
