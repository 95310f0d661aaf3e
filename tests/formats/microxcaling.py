"""The operations of Microsoft's microxcaling in eager PyTorch, in their order (`_quantize_mx`, `custom_cuda=False`)."""

from typing import Any

SMALLEST_NORMAL = 2.0**-126
LARGEST_EXPONENT = 127.0


def cast_mx(x: Any, *, ebits: int, mbits: int, emax: int, largest: float, block: int = 32) -> Any:
    """Return a float32 tensor `[..., k]` with the values of an MX format, ties away from zero."""
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
