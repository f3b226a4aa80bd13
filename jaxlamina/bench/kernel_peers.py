"""The kernels that `bench kernels` compares: ours by backend, and others' where they are installed.

Each peer takes a case's inputs and gives a function to call. Knows how each library wants its arguments.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels as pk
from pallas_kernels import dispatch
from pallas_kernels.quantized import QuantizedPool, values_of

if TYPE_CHECKING:
    from jaxlamina.bench.kernels_bench import KernelCaseInputs


class LeftOut(Exception):
    """Why a peer does not run a case here."""


@dataclass
class PreparedPeer:
    """A peer ready to run: `call` starts it, `output` makes its result `[B, N, H]` in numpy."""

    call: Callable[[], Any]
    output: Callable[[Any], np.ndarray]
    inputs: Any  # what its result is to be checked with
    bytes_read: float
    checked: bool = True


def wait(out: Any) -> None:
    """Until the device has finished what was called."""
    if type(out).__module__.startswith("torch"):
        import torch

        torch.cuda.synchronize()
    else:
        jax.block_until_ready(out)


def _pool_bytes(inputs: KernelCaseInputs) -> float:
    """Of the tokens in use: K and V, and what scales they have."""
    n_bytes = inputs.case.kv_bytes(values_of(inputs.k).dtype.itemsize)
    if isinstance(inputs.k, QuantizedPool):
        n_bytes += 2 * inputs.case.n_tokens * inputs.case.K * inputs.k.scales.dtype.itemsize
    return n_bytes


def ours(backend: str, int8: bool = False) -> Callable[[KernelCaseInputs], PreparedPeer]:
    """One of our backends. What the Hopper kernel plans for a step is planned before the clock runs: it is
    the same in all layers (and what FlashInfer plans is not in its time, either)."""

    def prepare(inputs: KernelCaseInputs) -> PreparedPeer:
        from jaxlamina.bench.kernels_bench import quantised

        if int8:
            inputs = quantised(inputs)
        q = inputs.q[:, None]
        if backend not in dispatch.candidates(dispatch.default_device()):
            raise LeftOut(f"not a backend for {dispatch.default_device().device_kind}")
        reason = dispatch.why_not(backend, q, inputs.k, return_mass=False)
        if reason is not None:
            raise LeftOut(reason)
        args: tuple[Any, ...] = (q, inputs.k, inputs.v, inputs.table, inputs.lengths)
        if backend == "mosaic_gpu":
            from pallas_kernels import mosaic_gpu

            spec = mosaic_gpu.spec_for(q, inputs.k, inputs.table, None, inputs.scale, None, None)
            args = (*args, jax.jit(lambda n: mosaic_gpu.plan_for(spec, n, None))(inputs.lengths))
            run = jax.jit(
                lambda q, k, v, table, lengths, plan: mosaic_gpu.partial_attention(
                    q, k, v, table, lengths, None, scale=inputs.scale, plan=plan
                )
            )
        else:
            run = jax.jit(lambda *a: pk.partial_attention(*a, scale=inputs.scale, backend=backend))
        compiled = run.lower(*args).compile()
        return PreparedPeer(
            lambda: compiled(*args), lambda out: np.asarray(out[0][:, 0]), inputs, _pool_bytes(inputs)
        )

    return prepare


def cudnn(inputs: KernelCaseInputs) -> PreparedPeer:
    """`jax.nn.dot_product_attention` through cuDNN on contiguous KV: what needs no slots. Needs equal
    lengths."""
    case = inputs.case
    if jax.default_backend() != "gpu":
        raise LeftOut("needs an NVIDIA GPU")
    if len(set(case.lengths)) > 1:
        raise LeftOut("contiguous KV of requests of several lengths would be padding for the most part")
    b, t = len(case.lengths), case.lengths[0]
    # The pool's own rows in their order: other tokens than the table's, but as many bytes.
    k, v = (x[: b * t].reshape(b, t, case.K, case.H) for x in (inputs.k, inputs.v))
    run = jax.jit(
        lambda q, k, v: jax.nn.dot_product_attention(q, k, v, scale=inputs.scale, implementation="cudnn")
    )
    try:
        compiled = run.lower(inputs.q[:, None], k, v).compile()
    except Exception as error:
        raise LeftOut(f"cuDNN refused: {str(error).splitlines()[0][:120]}") from error
    q = inputs.q[:, None]
    return PreparedPeer(
        lambda: compiled(q, k, v),
        lambda out: np.asarray(out[:, 0]),
        inputs,
        _pool_bytes(inputs),
        checked=False,
    )


def stock(inputs: KernelCaseInputs) -> PreparedPeer:
    """JAX's own paged attention for GPUs, one token a page; a pool of its own layout, KV heads first."""
    case = inputs.case
    if jax.default_backend() != "gpu":
        raise LeftOut("needs an NVIDIA GPU")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            from jax.experimental.pallas.ops.gpu import paged_attention
        except ImportError as error:
            raise LeftOut(f"this JAX has none ({error})") from error
        if len(set(case.lengths)) > 1 or case.lengths[0] % 512:
            raise LeftOut("it splits equal lengths only, into whole blocks")
        k, v = (jnp.moveaxis(x, 1, 0)[:, :, None] for x in (inputs.k, inputs.v))
        run = jax.jit(
            lambda q, k, v, t, n: paged_attention.paged_attention(
                q * jnp.asarray(inputs.scale, q.dtype), k, v, t, n, pages_per_compute_block=32, k_splits=16
            )
        )
        args = (inputs.q, k, v, inputs.table, inputs.lengths)
        try:
            compiled = run.lower(*args).compile()
        except Exception as error:
            raise LeftOut(f"it does not compile: {str(error).splitlines()[0][:120]}") from error
    return PreparedPeer(
        lambda: compiled(*args), lambda out: np.asarray(out, np.float32), inputs, _pool_bytes(inputs)
    )


def flashinfer(tensor_cores: bool) -> Callable[[KernelCaseInputs], PreparedPeer]:
    """FlashInfer's paged decode with one token a page, over the same arrays; its plan is made before the
    clock runs."""

    def prepare(inputs: KernelCaseInputs) -> PreparedPeer:
        case = inputs.case
        if importlib.util.find_spec("flashinfer") is None or importlib.util.find_spec("torch") is None:
            raise LeftOut("flashinfer and torch are not installed")
        if not tensor_cores and case.N != case.K:
            raise LeftOut("without tensor cores it is for one query head a KV head")
        import flashinfer as fi
        import torch

        def as_torch(x: jax.Array) -> Any:
            return torch.from_dlpack(x)

        k, v = (as_torch(x)[:, None] for x in (inputs.k, inputs.v))
        q = as_torch(inputs.q)
        ends = torch.tensor(np.concatenate([[0], np.cumsum(case.lengths)]), dtype=torch.int32, device="cuda")
        pages = torch.tensor(inputs.slots, device="cuda")
        last = torch.ones(len(case.lengths), dtype=torch.int32, device="cuda")
        space = torch.empty(384 << 20, dtype=torch.uint8, device="cuda")
        wrapper = fi.BatchDecodeWithPagedKVCacheWrapper(space, "NHD", use_tensor_cores=tensor_cores)
        kinds = {"q_data_type": q.dtype, "kv_data_type": k.dtype}
        wrapper.plan(ends, pages, last, case.N, case.K, case.H, 1, sm_scale=inputs.scale, **kinds)
        return PreparedPeer(
            lambda: wrapper.run(q, (k, v)), lambda out: out.float().cpu().numpy(), inputs, _pool_bytes(inputs)
        )

    return prepare


PEERS: dict[str, Callable[[KernelCaseInputs], PreparedPeer]] = {
    "mosaic_gpu": ours("mosaic_gpu"),
    "mosaic_gpu int8": ours("mosaic_gpu", int8=True),
    "triton": ours("triton"),
    "mosaic_tpu": ours("mosaic_tpu"),
    "native": ours("native"),
    "native int8": ours("native", int8=True),
    "xla": ours("xla"),
    "xla int8": ours("xla", int8=True),
    "flashinfer": flashinfer(tensor_cores=True),
    "flashinfer, no tensor cores": flashinfer(tensor_cores=False),
    "cudnn, contiguous": cudnn,
    "jax paged": stock,
}
