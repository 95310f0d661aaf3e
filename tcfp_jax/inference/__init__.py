"""Weights for inference without their float kernels, and ways to choose their FP4
codes.

served = quantize_params(params, find_weights(model))   # params of Linen, or nnx.state(model, nnx.Param)
model.apply(served, x)                                  # Linen
load_quantized(model, served)                           # NNX, in place
restored(loaded, find_weights(model))                   # variables that orbax loaded without a template

operand = search_scales(w, Fp4())                       # FP4, w [n, k]: the best scales, without any data
moments = hessians(model, params, batches)              # one pass over inputs
operand = gptq(w, moments[path], Fp4(rule="four_over_six"))
served = choose_codes(served, params, find_weights(model), lambda path, w: gptq(w, moments[path]))
"""

from tcfp_jax.inference.calibration import hessians
from tcfp_jax.inference.choosing import gptq, search_scales
from tcfp_jax.inference.serving import (
    choose_codes,
    load_quantized,
    quantize_params,
    restored,
    unpack,
)

__all__ = [
    "choose_codes",
    "gptq",
    "hessians",
    "load_quantized",
    "quantize_params",
    "restored",
    "search_scales",
    "unpack",
]
