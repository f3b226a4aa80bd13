"""Parameters that are made where they are put: for a model of which no device, and no host, is to hold all.

Knows shapes and placements; not how a parameter is made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np


@dataclass(frozen=True)
class Later:
    """A parameter that is not there yet. ``make(where)``: the array, there, or on the default device for
    None; anew each time."""

    shape: tuple[int, ...]
    dtype: np.dtype
    make: Callable[[jax.sharding.Sharding | None], jax.Array]

    @property
    def size(self) -> int:
        return int(np.prod(self.shape))

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize


def put(x: Any, where: jax.sharding.Sharding) -> jax.Array:
    """An array or a `Later`, there."""
    return x.make(where) if isinstance(x, Later) else jax.device_put(x, where)


def made(x: jax.Array | Later) -> jax.Array:
    """An array as it is, a `Later` on the default device."""
    return x.make(None) if isinstance(x, Later) else x
