"""Weights for inference without float kernels, and ways to choose their FP4 codes.

weights = find_weights(model)
served = quantize_params(params, weights)       # params of Linen, or an nnx.State
model.apply(served, x)                          # Linen
load_quantized(model, served)                   # NNX, in place
restored(loaded, weights)                       # of orbax, loaded without a template

operand = search_scales(w, Fp4())               # FP4, w [n, k]: without any data
moments = hessians(model, params, batches)      # one pass over inputs
operand = gptq(w, moments[path], Fp4(rule="four_over_six"))
served = choose_codes(served, params, weights, lambda path, w: gptq(w, moments[path]))
"""

from tcfp_jax.inference.calibration import hessians
from tcfp_jax.inference.choosing import gptq, search_scales
from tcfp_jax.inference.loading import load_quantized, restored
from tcfp_jax.inference.serving import choose_codes, quantize_params, unpack

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
