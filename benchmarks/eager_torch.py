"""An MX cast in eager PyTorch, operation by operation as microxcaling does it: what a user of it runs on a CPU.

Our own code after the published one (`mx/mx_ops.py`: blocks, shared exponents; `mx/elemwise_ops.py`: values): the same
operations on whole float32 tensors in the same order, each of which reads and writes memory. Its CUDA extension is not
in it. Needs torch.
"""

import importlib.util
from typing import Any

SMALLEST_NORMAL = 2.0**-126
LARGEST_EXPONENT = 127.0


def missing() -> str | None:
    """What this machine lacks, or None."""
    return None if importlib.util.find_spec("torch") else "torch is not installed"


def cast_mx(x: Any, *, ebits: int, mbits: int, emax: int, largest: float, block: int = 32) -> Any:
    """`x` with the values of an MX format of `block` values, ties away from zero, which is microxcaling's default.

    Args:
      x: a float32 tensor `[..., k]`, k a multiple of `block`.
      ebits, mbits: widths of the element's exponent and mantissa.
      emax: the exponent of its largest value, `largest`.

    Source: Microsoft, microxcaling, `_quantize_mx` with `custom_cuda=False` and a scale of 8 bits.
    """
    import torch

    tiles = x.view(*x.shape[:-1], x.shape[-1] // block, block)
    shared = torch.max(torch.abs(tiles), dim=-1, keepdim=True).values
    shared = torch.floor(torch.log2(shared + SMALLEST_NORMAL * (shared == 0).type(x.dtype))) - emax
    shared[shared > LARGEST_EXPONENT] = float("nan")
    shared[shared < -LARGEST_EXPONENT] = -LARGEST_EXPONENT
    scaled = tiles / (2**shared)
    values = _cast_values(torch, scaled, ebits=ebits, mbits=mbits, largest=largest)
    return (values * (2**shared)).view(x.shape)


def _cast_values(torch: Any, x: Any, *, ebits: int, mbits: int, largest: float) -> Any:
    private = torch.floor(torch.log2(torch.abs(x) + (x == 0).type(x.dtype)))
    private = private.clip(min=2 - 2 ** (ebits - 1))
    out = x / (2**private) * (2**mbits)
    out = torch.sign(out) * torch.floor(torch.abs(out) + 0.5)
    out = out / (2**mbits) * (2**private)
    out = torch.clamp(out, min=-largest, max=largest)
    for special in (float("inf"), -float("inf"), float("nan")):
        out[x == special] = special
    return out
