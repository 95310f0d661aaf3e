"""tmp"""
import jax, jax.numpy as jnp
from jax import lax
def keys(*words):
    x = jnp.uint32(0x9E3779B9)
    out=[]
    for round in range(2):
        for w in words:
            x = (x ^ jnp.asarray(w).astype(jnp.uint32)) * jnp.uint32(0x85EBCA6B); x = x ^ (x >> 13)
            x = x * jnp.uint32(0xC2B2AE35); x = x ^ (x >> 16)
        out.append(x)
    return tuple(out)
def random_bits(index, k0, k1):
    x = index + k0
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15) ^ k1) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)
def bits_of(shape, k0, k1):
    m, k = shape
    i = lax.broadcasted_iota(jnp.uint32, shape, 0)*jnp.uint32(k) + lax.broadcasted_iota(jnp.uint32, shape, 1)
    return random_bits(i, k0, k1)
