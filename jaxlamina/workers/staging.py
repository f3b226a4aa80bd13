"""Rows of host memory on their way to a device: a few arrays that are written to again and again.

Where the device can read an array by itself, it lies in pinned memory. From other memory one thread of the
host copies first (an H100 takes 5 GB/s so, and 49 from pinned memory). Knows bytes and a device.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Shaped, UInt8

from jaxlamina.workers.pinned_pieces import Pins


class Staging:
    """``arrays``: each ``[n_rows, row_bytes]``, for the caller to write to. ``pinned``, ``device``: where
    memory is that the device reads, and where its own is; without them arrays are numpy's alone.

    JAX takes an array for one that never changes. So one that `on_device` was called for may be written to
    once a program is done that took what it gave.
    """

    def __init__(
        self,
        n: int,
        n_rows: int,
        row_bytes: int,
        dtype: np.dtype,
        *,
        pinned: jax.sharding.Sharding | None,
        device: jax.sharding.Sharding,
    ) -> None:
        self._dtype, self._device = dtype, device
        self._pinned: list[jax.Array] = []
        if pinned is None:
            self.arrays: list[UInt8[np.ndarray, "n_rows row_bytes"]] = [
                np.empty((n_rows, row_bytes), np.uint8) for _ in range(n)
            ]
            return
        shape = n_rows, row_bytes // dtype.itemsize
        # Of one array of zeros each: on a CPU the array may be that memory itself.
        self._pinned = [jax.device_put(np.zeros(shape, dtype), pinned) for _ in range(n)]
        self.arrays = [memory_of(x).reshape(n_rows, row_bytes) for x in jax.block_until_ready(self._pinned)]

    def on_device(self, i: int, n_rows: int) -> Shaped[jax.Array | np.ndarray, "n_rows row"]:
        """The first rows of array ``i``, as the dtype; all of them where the device copies them by itself."""
        if self._pinned:
            return jax.device_put(self._pinned[i], self._device)
        return self.arrays[i][:n_rows].view(self._dtype)


class Landing:
    """``n`` arrays ``[n_rows, row]`` on a device, to which it copies pinned memory of the host by itself."""

    def __init__(
        self, pins: Pins, n: int, shape: tuple[int, int], dtype: np.dtype, device: jax.sharding.Sharding
    ) -> None:
        self._pins = pins
        # Whatever ran before in the same memory has ended then.
        self.arrays = jax.block_until_ready([jnp.zeros(shape, dtype, device=device) for _ in range(n)])

    def begin(self, i: int, parts: Iterable[tuple[int, int]]) -> None:
        """Copies ``parts``, (address, bytes) each, to array ``i``, which no program reads any more. Until
        `wait` the array may not be read."""
        self._pins.begin_copies(self.arrays[i].unsafe_buffer_pointer(), parts)

    def wait(self) -> None:
        """For all that was begun."""
        self._pins.wait_for_copies()


def memory_of(x: jax.Array) -> UInt8[np.ndarray, " bytes"]:
    """The memory of an array that is in the host's. It is the array's, which must live as long."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * x.nbytes).from_address(x.unsafe_buffer_pointer()))
