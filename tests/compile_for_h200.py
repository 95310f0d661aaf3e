"""Compiling for H200s, and for B200s, on a machine without a GPU.

The CUDA plugin needs a description of the device, and ptxas.
`data/h200.txtpb` is what XLA itself writes of an H200 (`XLA_FLAGS=--xla_dump_to=DIR`:
`*.gpu_target_config.pbtxt`). `data/b200.txtpb` has the values that XLA publishes of a
B200 (`xla/backends/gpu/target_config/specs`), with the H200's libraries. Nothing is
autotuned this way, so what XLA would choose between Triton and cuBLASLt on the device
does not show.
"""

import functools
import importlib.util
import math
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax._src.config import persistent_cache_min_compile_time_secs
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels.operands import SCALE_DTYPE, Block, Operand
from tests.collectives import GATHERS as GATHERS

TARGETS = Path(__file__).parent / "data"
PTXAS = shutil.which("ptxas") or ""
# XLA compiles each fusion once more by itself to choose how it is emitted. Without a
# device nothing is timed, it keeps the first choice, and half of the time is lost: 30 s
# of 50 for a training step. Triton's GEMMs, LLVM and ptxas take a quarter of the rest,
# and change nothing that is read; kernels of Mosaic do not follow these options.
OPTIONS = dict.fromkeys(
    ["xla_llvm_disable_expensive_passes", "xla_gpu_disable_gpuasm_optimizations"], True
)
OPTIONS |= dict.fromkeys(
    ["xla_gpu_experimental_enable_fusion_autotuner", "xla_gpu_enable_triton_gemm"],
    False,
)
OPTIONS["xla_backend_optimization_level"] = 0


@dataclass(frozen=True)
class Compiled:
    """An optimized program.

    Attributes:
      text: its HLO.
      targets: names of its custom calls.
      temporary_bytes: its bytes besides its arguments.
    """

    text: str
    targets: list[str]
    temporary_bytes: int

    def results(self, operation: str) -> list[str]:
        """Types of the results of an HLO operation, wherever it occurs."""
        return re.findall(rf"= (\S+|\(.*?\)) {operation}(?:-start)?\(", self.text)


def expected() -> bool:
    """Return whether this run promised to compile for an H200, as `.ci/run` may."""
    return os.environ.get("TCFP_EXPECT_H200_COMPILER") == "1"


def missing() -> str | None:
    """Return the part that this machine lacks, or None."""
    for module in ("jax_plugins", "jax_plugins.xla_cuda13"):
        if importlib.util.find_spec(module) is None:
            return (
                "compiling for an H200 needs the wheels jax-cuda13-plugin and"
                " jax-cuda13-pjrt"
            )
    return None if PTXAS else "compiling for an H200 needs ptxas of CUDA 13 on the PATH"


needs_plugin = pytest.mark.skipif(missing() is not None, reason=str(missing()))


def largest_stack(capfd) -> int:
    """Return the bytes of the largest stack frame of which ptxas spoke."""
    stacks = re.findall(r"(\d+) bytes stack frame", "".join(capfd.readouterr()))
    assert stacks, "ptxas said nothing of the kernel"
    return max(map(int, stacks))


@functools.lru_cache(maxsize=4)
def h200s(*shape: int, target: str = "h200") -> Mesh:
    """A mesh of H200s that are not there, with axes named a, b, ...; or of others."""
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    os.environ.setdefault("MOSAIC_GPU_CUDA_ROOT", "/usr/local/cuda")
    os.environ["MOSAIC_GPU_DUMP_PTXAS"] = "1"
    jax.devices()  # finds the plugin
    devices = topologies.get_topology_desc(
        platform="cuda",
        target_config=(TARGETS / f"{target}.txtpb").read_text(encoding="utf-8"),
        topology=f"1x1x{math.prod(shape)}",
    )
    return topologies.make_mesh(
        topo=devices, mesh_shape=shape, axis_names=tuple("abcd"[: len(shape)])
    )


def on(
    mesh: Mesh, shape: tuple[int, ...], dtype, *axes: str | None
) -> jax.ShapeDtypeStruct:
    """An argument of `compile_for`, split over `axes` of the mesh."""
    return jax.ShapeDtypeStruct(
        shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*axes))
    )


def on_once(
    mesh: Mesh, shape: tuple[int, ...], dtype, *axes: str | None, halves: int = 1
) -> Operand:
    """An operand with one scale."""
    values = on(mesh, shape, dtype, *axes)
    return Operand(values, on(mesh, (), jnp.float32), values if halves == 2 else None)


def on_blocks(
    mesh: Mesh,
    sizes: tuple[int, int, int],
    scaling: Block,
    x_axes=(),
    w_axes=(),
    *,
    halves: int = 2,
) -> tuple[Operand, Operand]:
    """x and w of a product of m, k, n in blocks; `scaling` is that of w."""

    def blocked(shape, scaling, axes, halves):
        values = on(mesh, shape, jnp.float8_e4m3fn, *axes)
        scale = on(mesh, scaling.scale_shape(shape), SCALE_DTYPE, *axes)
        residual = (values, scale) if halves == 2 else (None, None)
        return Operand(values, scale, *residual, scaling)

    m, k, n = sizes
    x = blocked((m, k), scaling.along_rows, x_axes, 1)
    return x, blocked((n, k), scaling, w_axes, halves)


def compile_for(mesh: Mesh, function, *arguments, **jit_options) -> Compiled:
    """Lower and compile a function of arguments from `on`."""
    # Without a GPU a program cannot be loaded, so none is written to a persistent
    # cache.
    with (
        jax.sharding.use_abstract_mesh(mesh.abstract_mesh),
        persistent_cache_min_compile_time_secs(math.inf),
    ):
        # Named, because JAX looks for a GPU that is there where axes are explicit.
        traced = jax.jit(function, **jit_options).trace(*arguments)
        compiled = traced.lower(lowering_platforms=("cuda",)).compile(
            compiler_options=OPTIONS
        )
    text = compiled.as_text()
    targets = re.findall(r'custom_call_target="([^"]*)"', text)
    return Compiled(text, targets, compiled.memory_analysis().temp_size_in_bytes)
