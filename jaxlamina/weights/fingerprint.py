"""What tells weights from others of the same shapes: a digest of their bits, or of sums over them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import UInt8, UInt32

from jaxlamina.weights.later import Later, made

_PLATFORM_OF_HOST = "cpu"


def fingerprint(params: Mapping[str, jax.Array | Later]) -> str:
    """Sixteen bytes in hexadecimal. Other weights, as after training, have another one; it is no proof
    against somebody who makes weights that agree in it."""
    digest = hashlib.blake2b(digest_size=16)
    found = []
    for name in sorted(params):  # of all before one is waited for
        x = made(params[name])
        found.append((f"{name} {x.dtype} {x.shape} ", _of_bits(x)))
    for name, bits in found:
        digest.update(name.encode())
        digest.update(np.asarray(bits).tobytes())
    return digest.hexdigest()


def _of_bits(x: jax.Array) -> UInt32[jax.Array, " 2"] | UInt8[np.ndarray, " 20"]:
    """In the host's memory they are read where they are: a program for each shape takes longer to compile. An
    accelerator's stay there."""
    if isinstance(x, jax.Array) and _PLATFORM_OF_HOST not in {device.platform for device in x.devices()}:
        return _sums(x)
    bits = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
    return np.frombuffer(hashlib.sha1(bits.data, usedforsecurity=False).digest(), np.uint8)


@jax.jit
def _sums(x: jax.Array) -> jax.Array:
    """Two sums of all elements' bits, each mixed with its place: of integers, so whatever the order. In one
    pass, and where the array is."""
    if jnp.iscomplexobj(x):
        x = jnp.stack([x.real, x.imag])
    if jnp.issubdtype(x.dtype, jnp.floating):
        x = lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * min(4, x.dtype.itemsize)}"))
    bits = x.astype(jnp.uint32)
    at = jnp.zeros(bits.shape, jnp.uint32)
    for axis, n in enumerate(bits.shape):
        at = at * np.uint32(n % 2**32) + lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
    x = bits ^ (at * np.uint32(0x9E3779B9))
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)  # each bit changes about half of the others
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    x = x ^ (x >> 16)
    return jnp.stack([x.sum(dtype=jnp.uint32), (x * (2 * at + 1)).sum(dtype=jnp.uint32)])
