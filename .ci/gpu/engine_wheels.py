"""Make wheels of Transformer Engine for JAX that fit into one call of a GPU machine.

    PYTHON .ci/gpu/engine_wheels.py .te

PYTHON is a virtual environment of the GPU machine's Python, 3.12, with the machine's
versions of `jax` and `jaxlib`. The command installs `NEEDED` in it, compiles C++ with
g++, and takes ten minutes. The library of Transformer Engine holds code of nine kinds
of GPUs; Hopper's alone stays, so its wheel shrinks from 276 to 29 MB. The binding to
JAX exists as source only, so it is built here.
"""

import argparse
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

VERSION = "2.20.2"
CORE = "transformer_engine_cu13"
BINDING = "transformer_engine_jax"
# Headers of CUDA, at the versions that torch 2.11.0 pins on the GPU machine.
NEEDED = (
    "cuda-toolkit[cublas,cudart,nvrtc,curand,nvtx,crt,cccl]==13.0.2",
    "nvidia-cudnn-cu13==9.19.0.56",
    "nvidia-nccl-cu13==2.28.9",
    "nvidia-cudnn-frontend",
    "jax-cuda13-plugin==0.11.2",
    "pybind11",
    "setuptools",
    "wheel",
)
# Python packages that Transformer Engine imports and the GPU machine lacks.
IMPORTED = (
    "pydantic",
    "pydantic-core",
    "annotated-types",
    "typing-extensions",
    "typing-inspection",
    "importlib-metadata",
)
HOPPER = 90
# Folders of the wheel that JAX does not need.
UNUSED = ("transformer_engine/pytorch", "transformer_engine/wheel_lib/nccl_ep")
MAGIC = struct.pack("<I", 0xBA55ED50)  # begins every region of GPU code


def python(*words: str, **env: str) -> None:
    """Run a module of this interpreter."""
    subprocess.run([sys.executable, "-m", *words], check=True, env=os.environ | env)


def sections(elf: bytearray) -> Iterator[tuple[str, int, int]]:
    """Yield (name, offset, size) of the sections of a 64-bit ELF file."""
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    entry_size, count, of_names = struct.unpack_from("<HHH", elf, 0x3A)
    heads = []
    for index in range(count):
        at = table + index * entry_size
        (name,) = struct.unpack_from("<I", elf, at)
        offset, size = struct.unpack_from("<QQ", elf, at + 24)
        heads.append((name, offset, size))
    names = heads[of_names][1]
    for name, offset, size in heads:
        start = names + name
        yield elf[start : elf.index(0, start)].decode(), offset, size


def keep_architecture(elf: bytearray, wanted: int) -> None:
    """Remove GPU code of other architectures, in place.

    A region has a header with the length of its entries, and each entry has a header
    with its length and architecture. Regions keep their places, which the host's code
    knows; their entries move together, and zeros follow.
    """
    ((start, size),) = [
        (offset, size) for name, offset, size in sections(elf) if name == ".nv_fatbin"
    ]
    at = start
    while at < start + size:
        if elf[at : at + 4] != MAGIC:
            at += 8
            continue
        header, length = struct.unpack_from("<HQ", elf, at + 6)
        begin = at + header
        end = begin + length
        kept = bytearray()
        entry = begin
        while entry < end:
            head, code = struct.unpack_from("<IQ", elf, entry + 4)
            (architecture,) = struct.unpack_from("<I", elf, entry + 28)
            if architecture == wanted:
                kept += elf[entry : entry + head + code]
            entry += head + code
        elf[begin:end] = kept.ljust(length, b"\0")
        struct.pack_into("<Q", elf, at + 8, len(kept))
        at = end


def make_core(wheel: Path, out: Path) -> None:
    """Write the wheel of the library with Hopper's code alone."""
    with tempfile.TemporaryDirectory() as folder:
        python("wheel", "unpack", str(wheel), "--dest", folder)
        (root,) = Path(folder).iterdir()
        for unused in UNUSED:
            shutil.rmtree(root / unused)
        (root / "transformer_engine/wheel_lib/libnccl_ep.so").unlink()
        library = root / "transformer_engine/wheel_lib/libtransformer_engine.so"
        elf = bytearray(library.read_bytes())
        keep_architecture(elf, HOPPER)
        library.write_bytes(elf)
        python("wheel", "pack", str(root), "--dest-dir", str(out))


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("out", type=Path, help="folder of the wheels")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    python("pip", "install", "-q", *NEEDED)
    with tempfile.TemporaryDirectory() as folder:
        whole = ["pip", "download", "-q", "--no-deps", "--dest"]
        python(*whole, folder, f"{CORE}=={VERSION}")
        (wheel,) = Path(folder).iterdir()
        make_core(wheel, out)
        python(*whole, str(out), f"transformer_engine=={VERSION}", *IMPORTED)
    python(
        *("pip", "wheel", "-q", "--no-deps", "--no-build-isolation"),
        *("--wheel-dir", str(out), f"{BINDING}=={VERSION}"),
        NVTE_BUILD_USE_NVIDIA_WHEELS="1",
        NVTE_WITH_NCCL_EP="0",
    )
    total = sum(path.stat().st_size for path in out.iterdir())
    print(f"{out}: {len([*out.iterdir()])} wheels, {total / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
