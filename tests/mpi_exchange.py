"""One rank of `test_mpi`: rank 0 sends an array inside a jitted function, rank 1 doubles it and sends it
back."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import mpi4jax
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank = comm.Get_rank()
assert comm.Get_size() == 2, comm.Get_size()


@jax.jit
def step(x: jax.Array) -> jax.Array:
    if rank == 0:
        mpi4jax.send(x + 1, dest=1, comm=comm)
        return mpi4jax.recv(x, source=1, comm=comm)
    received = mpi4jax.recv(x, source=0, comm=comm)
    mpi4jax.send(2 * received, dest=0, comm=comm)
    return received


# Rank 1's own values are of no use to rank 0: a right answer can only have come over.
x = jnp.arange(1024, dtype=jnp.float32) if rank == 0 else jnp.full(1024, -1, jnp.float32)
for i in range(3):
    x = step(x)
    wanted = jnp.arange(1024, dtype=jnp.float32)
    for _ in range(i):
        wanted = 2 * (wanted + 1)
    wanted = wanted + 1 if rank == 1 else 2 * (wanted + 1)
    assert (x == wanted).all(), f"rank {rank}, step {i}: {x[:4]} must be {wanted[:4]}"
if rank == 0:
    print(f"exchanged {x.size} numbers, last {int(x[-1])}", flush=True)
