"""Which backend runs a partial attention: picked by platform and shape, or forced.

A backend is a module with `partial_attention(q, k_pool, v_pool, slot_table, lengths, q_positions, *, scale,
window, softcap, return_mass, interpret=False)` and `supports(q, k_pool, *, return_mass)`, which gives None or
why it cannot. One may also have `attention_with_own`, with `supports_own_token`, and `decode_attention`, with
its two halves `begin_decode_attention` and `end_decode_attention` and with `supports_decode`, which do in
fewer kernels what `attention` else makes of partials. Modules are imported when first asked for: what a
machine lacks costs it nothing. The choice is made while tracing: a program that is compiled already keeps its
backend. Knows nothing of what backends compute.
"""

from __future__ import annotations

import contextlib
import contextvars
import importlib
import os
from collections.abc import Iterator
from types import ModuleType

import jax
from jax import Array
from jaxtyping import Float

from pallas_kernels.quantized import Like, Pool, PoolLike

ENV_VAR = "JAXLAMINA_ATTENTION_BACKEND"
_MODULES = {
    "xla": "pallas_kernels.xla",
    "triton": "pallas_kernels.triton",
    "mosaic_gpu": "pallas_kernels.mosaic_gpu",
    "mosaic_tpu": "pallas_kernels.tpu",
    "native": "pallas_kernels.cpu",
}
BACKENDS = tuple(_MODULES)
_forced: contextvars.ContextVar[str | None] = contextvars.ContextVar("attention backend", default=None)


@contextlib.contextmanager
def use_backend(name: str | None) -> Iterator[None]:
    """Forces a backend for what is traced inside the block; None goes back to picking (and the environment).

    Raises ValueError for an unknown name.
    """
    token = _forced.set(None if name is None else _known(name, "backend"))
    try:
        yield
    finally:
        _forced.reset(token)


def forced_backend(backend: str | None = None) -> str | None:
    """The backend asked for by argument, `use_backend` or JAXLAMINA_ATTENTION_BACKEND, in that order, or
    None."""
    if backend is not None:
        return _known(backend, "backend")
    if (inner := _forced.get()) is not None:
        return inner
    by_env = os.environ.get(ENV_VAR, "")
    return _known(by_env, ENV_VAR) if by_env and by_env != "auto" else None


def default_device() -> jax.Device:
    """Where a program traced now will run: `jax.default_device` if that is set, else the first device."""
    chosen = getattr(jax.config, "jax_default_device", None)
    if chosen is None:
        return jax.local_devices()[0]
    return jax.local_devices(backend=chosen)[0] if isinstance(chosen, str) else chosen


def candidates(device: jax.Device) -> tuple[str, ...]:
    """Backends that may serve a device, the preferred one first. XLA, the last, serves every case."""
    if device.platform == "tpu":
        return "mosaic_tpu", "xla"
    if device.platform in ("gpu", "cuda"):
        if compute_capability(device) >= (9, 0):
            return "mosaic_gpu", "triton", "xla"
        return "triton", "xla"
    return ("native", "xla") if device.platform == "cpu" else ("xla",)


def compute_capability(device: jax.Device) -> tuple[int, int]:
    """An NVIDIA GPU's, such as (9, 0); (0, 0) for a device that has none."""
    text = str(getattr(device, "compute_capability", "") or "")
    major, _, minor = text.partition(".")
    return (int(major), int(minor or 0)) if major.isdigit() else (0, 0)


def pick(
    q: Float[Array, "B Tq N H"], k_pool: Pool, *, return_mass: bool, backend: str | None = None
) -> ModuleType:
    """The module to run this case. q and the pool are looked at for shape and dtype only.

    Raises ValueError where the forced backend does not support the case, naming why and the alternatives.
    """
    device = default_device()
    forced = forced_backend(backend)
    if forced is not None:
        reason = why_not(forced, q, k_pool, return_mass=return_mass)
        if reason is None:
            return _module(forced)
        others = [n for n in candidates(device) if n != forced]
        serving = [n for n in others if why_not(n, q, k_pool, return_mass=return_mass) is None]
        raise ValueError(
            f"attention backend {forced} does not do this case: {reason}. Leave backend and {ENV_VAR} "
            f"unset, or use {' or '.join(serving)}"
        )
    for name in candidates(device):
        if why_not(name, q, k_pool, return_mass=return_mass) is None:
            return _module(name)
    raise AssertionError("the XLA backend serves every case")


def why_not(name: str, q: Float[Like, "B Tq N H"], k_pool: PoolLike, *, return_mass: bool) -> str | None:
    """None where the backend computes the case, else why it does not."""
    try:
        module = _module(name)
    except ImportError as error:
        return f"this JAX does not have what it needs ({error})"
    reason: str | None = module.supports(q, k_pool, return_mass=return_mass)
    return reason


def _module(name: str) -> ModuleType:
    return importlib.import_module(_MODULES[name])


def _known(name: str, what: str) -> str:
    if name not in _MODULES:
        raise ValueError(f"{what}={name!r} must be one of {', '.join(BACKENDS)}")
    return name
