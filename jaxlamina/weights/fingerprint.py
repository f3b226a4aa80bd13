"""What tells a model's weights from others of the same shapes: a digest of samples of all of them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import jax
import numpy as np

from jaxlamina.weights.later import Later, made

_MOST = 65_536  # elements of an array that are looked at


def fingerprint(params: Mapping[str, jax.Array | Later]) -> str:
    """Sixteen bytes in hexadecimal. Other weights, as after training, have another one; it is no proof
    against somebody who makes weights that agree in the samples."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(params):
        x = made(params[name])
        sample = np.asarray(_sample(x))
        digest.update(f"{name} {x.dtype} {x.shape} ".encode())
        digest.update(sample.tobytes())
    return digest.hexdigest()


@jax.jit
def _sample(x: jax.Array) -> jax.Array:
    """Elements of all rows, as evenly as an odd step takes them."""
    flat = x.reshape(-1)
    step = max(1, flat.size // _MOST) | 1
    return flat[::step]
