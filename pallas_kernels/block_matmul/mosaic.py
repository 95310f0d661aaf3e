"""`block_matmul` for Hopper in Pallas Mosaic GPU: which shapes it takes, with which tiles.

The kernel is that of `matmul/mosaic_kernel.py` with full accumulation: a sum over one block of k is scaled by the scales
of x and w where it is promoted, in float32 registers (DeepSeek-V3, 2024). Both halves of a weight share a scale, so they
share the sum. 128 is what the tensor cores hide; blocks of 64 and 32 promote two and four times as often.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import numerics, tuning
from pallas_kernels.block_matmul import reference
from pallas_kernels.blocks import Tile
from pallas_kernels.dispatch import device_kind
from pallas_kernels.matmul import mosaic
from pallas_kernels.matmul.mosaic import Config, Plan
from pallas_kernels.matmul.reference import sizes


def candidates(m: int, k: int, n: int, halves: int, block: int) -> list[Config]:
    """Configs that this shape divides into, best guess first."""
    stages = {128: 4 - halves, 64: 6 - 2 * halves, 32: 8}[block]
    guesses = [
        Config(256, 128, tile_k=block, stages=stages, pipeline=pipeline, cluster=cluster)
        for pipeline in ("steady", "drained")
        for cluster in (1, 2)
    ]
    guesses += [Config(128, 128, tile_k=block, stages=4, cluster=cluster) for cluster in (1, 2)]
    return [config for config in guesses if mosaic.misfit(config, m, k, n, halves) is None]
