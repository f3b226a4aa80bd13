"""Messages from one GPU into another's memory, inside a program: `put` here meets `take` there.

For GPUs of one host, where each can write to the other's memory. What a message is, and who counts them, is
the caller's affair (`jaxlamina.transports.mailbox`); how it goes over is `gpu.mail`'s. XLA knows nothing of
the memory that is written to, so whoever wants an order gives ``after``.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float32, Int32

from pallas_kernels.dispatch import compute_capability
from pallas_kernels.gpu import mail as kernels
from pallas_kernels.gpu.mail import Carrier, Ring

_KINDS = {"bfloat16": "bf16", "float32": "f32"}  # of `kernels.add_up`


def supports(device: jax.Device) -> bool:
    """Whether the kernels run there: Hopper or later."""
    return device.platform == "gpu" and compute_capability(device) >= (9, 0)


def n_bytes(like: Array | jax.ShapeDtypeStruct) -> int:
    """Of an array."""
    return math.prod(like.shape) * jnp.dtype(like.dtype).itemsize


def put(
    x: Array,
    peers: Int32[Array, "n_ranks fields"],
    peer: int,
    tag: int,
    ring: Ring,
    after: Array | None = None,
) -> Float32[Array, ""]:
    """Writes ``x`` into the peer's ring, once ``after`` is there. A 0 that is there when it is written.

    ``peers``: `gpu.mail`'s table, of which row ``peer`` is used; ``tag``: a number that no other call in the
    program has, or XLA would take two calls for one. x's bytes must be such as ``ring.carries``."""
    assert ring.carries(n_bytes(x)), f"{x.shape} {x.dtype} does not go through {ring}"
    given = [] if after is None else [after.reshape(-1)]
    return _put(x, peers, jnp.full(1, tag, jnp.int32), given, peer, ring).reshape(())


def take(
    like: jax.ShapeDtypeStruct,
    peers: Int32[Array, "n_ranks fields"],
    peer: int,
    tag: int,
    ring: Ring,
    after: Array | None = None,
) -> Array:
    """What the peer has `put`, waited for once ``after`` is there. Arguments as of `put`."""
    assert ring.carries(n_bytes(like)), f"{like.shape} {like.dtype} does not go through {ring}"
    given = [] if after is None else [after.reshape(-1)]
    return _take(peers, jnp.full(1, tag, jnp.int32), given, like.shape, jnp.dtype(like.dtype), peer, ring)


def adds(x: Array | jax.ShapeDtypeStruct) -> bool:
    """Whether `add_up` knows the elements."""
    return jnp.dtype(x.dtype).name in _KINDS


def add_up(
    x: Array,
    peers: Int32[Array, "n_ranks fields"],
    ranks: tuple[int, ...],
    rank: int,
    tag: int,
    ring: Ring,
    after: Array | None = None,
) -> Array:
    """The sum of what all ``ranks`` give here as ``x``, each its own, in their order by float32: the same on
    all. ``rank``: this one. Other arguments as of `put`."""
    assert ring.carries(n_bytes(x)) and adds(x), f"{x.shape} {x.dtype} is not added up through {ring}"
    given = [] if after is None else [after.reshape(-1)]
    return _add_up(x, peers, jnp.full(1, tag, jnp.int32), given, ranks, rank, ring)


@partial(jax.jit, static_argnums=(4, 5, 6))
def _add_up(
    x: Array, peers: Array, tag: Array, after: list[Array], ranks: tuple[int, ...], rank: int, ring: Ring
) -> Array:
    def program(w: Any, part: Any, peers: Any, *rest: Any) -> None:
        kernels.add_up(w, ring, peers, ranks, rank, part, size, _KINDS[x.dtype.name], rest[-1])

    size = n_bytes(x)
    result = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return _kernel("mail_add_up", program, result, ring)(x, peers, tag, *after)


@partial(jax.jit, static_argnums=(4, 5))
def _put(x: Array, peers: Array, tag: Array, after: list[Array], peer: int, ring: Ring) -> Array:
    def program(w: Any, x: Any, peers: Any, *rest: Any) -> None:
        Carrier(w, ring, peers, peer).put(x, size, rest[-1])

    size = n_bytes(x)
    result = jax.ShapeDtypeStruct((1,), jnp.float32)
    return _kernel("mail_put", program, result, ring)(x, peers, tag, *after)


@partial(jax.jit, static_argnums=(3, 4, 5, 6))
def _take(
    peers: Array, tag: Array, after: list[Array], shape: tuple[int, ...], dtype: Any, peer: int, ring: Ring
) -> Array:
    def program(w: Any, peers: Any, *rest: Any) -> None:
        Carrier(w, ring, peers, peer).take(rest[-1], n_bytes(result))

    result = jax.ShapeDtypeStruct(shape, dtype)
    return _kernel("mail_take", program, result, ring)(peers, tag, *after)


def _kernel(name: str, program: Any, result: jax.ShapeDtypeStruct, ring: Ring) -> Any:
    """A warp's program, of the addresses of arguments and result, as a kernel, which traces know by its
    function's name."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from pallas_kernels.gpu.warp_mosaic import MosaicWarp, global_pointer

    def kernel(*refs: Any) -> None:
        @plgpu.inline_mgpu(arg_types=tuple(plgpu.RefType() for _ in refs))
        def run(_context: Any, *refs: Any) -> None:
            program(MosaicWarp(), *(global_pointer(ref) for ref in refs))

        run(*refs)

    kernel.__name__ = name
    return plgpu.kernel(
        kernel,
        out_type=result,
        grid=(ring.n_ctas,),
        grid_names=("cta",),
        num_threads=ring.n_warps // 4,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
