"""What fits: KV slots, weights, steps, from the memory a device has free, or the host where that is the
device.

Knows bytes and devices; nothing of models.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence

import jax

from jaxlamina.errors import UserError
from jaxlamina.options import PROMPT_BATCH_TOKENS
from jaxlamina.process.host_memory import host_free_bytes
from jaxlamina.workers.spec import AttentionSpec
from jaxlamina.workers.workspace import LargestStep

# An accelerator is ours; a host is shared with everything else that runs there.
ACCELERATOR_FRACTION, HOST_FRACTION = 0.85, 0.1
# Of a host's free memory, for KV that has left an accelerator. It is taken when KV comes, not before.
HOST_TIER_FRACTION = 0.25
_BITS = 8  # of a number of slots that memory bounds, the others are 0: half a percent
# Of a host's free memory, what is given to somebody who asks for so much.
EXPLICIT_FRACTION = 0.9


def slots_that_fit(
    specs: Sequence[AttentionSpec],
    device: jax.Device,
    most: int,
    least: int,
    *,
    share: float = 1.0,
    workspace_bytes: int = 0,
) -> int:
    """At most ``most`` slots, as far as a fraction of the device's free memory goes; not to the last slot,
    since programs are compiled for so many, and the next start is to find them again.

    ``share``: the part of each token's KV that ``device`` keeps. ``workspace_bytes``: what the largest step
    needs there beside KV. ``UserError`` with the numbers if not even ``least`` fit.
    """
    slot_bytes = sum(spec.slot_bytes for spec in specs) * share
    free_bytes, fraction = free_memory_bytes(device)
    room = int(max(0.0, free_bytes * fraction - workspace_bytes) // slot_bytes)
    n = min(most, max(room - room % (1 << max(0, room.bit_length() - _BITS)), min(room, least)))
    if n < least:
        said = f"{fraction:.0%} of the {free_bytes / 2**20:,.0f} MiB free on {device}"
        if workspace_bytes:
            said += f", less {workspace_bytes / 2**20:,.0f} MiB that the largest step needs,"
        raise UserError(
            f"{said} hold {n} KV slots of {slot_bytes:,.0f} bytes, fewer than one request of {least} tokens: "
            "lower max_model_len or give kv_slots"
        )
    return n


def host_slots_that_pay(
    specs: Sequence[AttentionSpec], devices: Sequence[jax.Device], n_slots: int, *, n_sharing: int = 1
) -> int:
    """Slots in host memory beside ``n_slots`` on ``devices``: as many again, as far as a quarter of the
    memory that is free goes, of which ``n_sharing`` processes have an equal part each.

    ``specs``: of what this process keeps. None beside a host's own memory: it costs as much there as more
    slots do, and those need no moving.
    """
    if not all(map(is_accelerator, devices)):
        return 0
    slot_bytes = sum(spec.slot_bytes for spec in specs)
    return min(n_slots, int(HOST_TIER_FRACTION * host_free_bytes() / n_sharing / slot_bytes))


# (specs, device, share=…, workspace_bytes=…) -> S: `slots_that_fit` with its other arguments given
HowManySlots = Callable[..., int]


def resolve_slots(
    n_slots: HowManySlots | int,
    specs: Sequence[AttentionSpec],
    devices: Sequence[jax.Device],
    workspace_bytes: Callable[[jax.Device], int] = lambda device: 0,
) -> int:
    """S slots for a worker on each of ``devices`` (which may repeat): as many as the fullest device holds, or
    as somebody asked for (`check_slots`)."""
    n_on = Counter(devices)
    if isinstance(n_slots, int):
        for device, n in n_on.items():
            check_slots(n_slots, specs, device, share=n / len(devices), workspace_bytes=workspace_bytes)
        return n_slots
    return min(
        n_slots(specs, device, share=n / len(devices), workspace_bytes=workspace_bytes(device))
        for device, n in n_on.items()
    )


def resolve_host_slots(
    n_host_slots: int | None, specs: Sequence[AttentionSpec], devices: Sequence[jax.Device], n_slots: int
) -> int:
    """``n_host_slots``, or where that is None as many as pay beside ``n_slots`` on ``devices``, all of this
    process. ``UserError`` if they do not fit."""
    if n_host_slots is None:
        return host_slots_that_pay(specs, devices, n_slots)
    check_host_slots(n_host_slots, specs)
    return n_host_slots


def spread_over(n: int, first: jax.Device, model_device: jax.Device) -> list[jax.Device]:
    """Devices for ``n`` attention workers: ``first``, then others of its platform, round and round.

    The model worker's own device is left out where there are others (unless it is ``first``).
    """
    others = [d for d in jax.local_devices(backend=first.platform) if d not in (first, model_device)]
    return list(itertools.islice(itertools.cycle([first, *others]), n))


def is_accelerator(device: jax.Device) -> bool:
    """Whether a device has memory of its own, all for us."""
    return device.platform != "cpu"


def free_memory_bytes(device: jax.Device) -> tuple[int, float]:
    """Bytes free where ``device`` keeps its arrays, and the fraction of them that KV may take."""
    stats = device.memory_stats() if is_accelerator(device) else None
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0), ACCELERATOR_FRACTION
    return host_free_bytes(), HOST_FRACTION


def check_weights(n_bytes: int, dtype: str, device: jax.Device) -> None:
    """``UserError`` if weights of so many bytes do not fit where ``device`` keeps its arrays; before any is
    read."""
    free_bytes, _ = free_memory_bytes(device)
    if n_bytes > free_bytes:
        smaller = ", dtype=bfloat16" if dtype == "float32" else ""
        raise UserError(
            f"the weights take {_mib(n_bytes)} as {dtype}, and {_mib(free_bytes)} are free on {device}: "
            f"take a smaller model{smaller} or a larger device"
        )


def check_largest_step(largest: LargestStep, vocab_size: int) -> None:
    """``UserError`` if the slot table and the logits of a step of all rows alone are more than the host
    has."""
    table_bytes = 4 * largest.batch * (largest.context + vocab_size)
    free_bytes = host_free_bytes()
    if table_bytes > free_bytes * EXPLICIT_FRACTION:
        raise UserError(
            f"a step of max_num_seqs={largest.batch} requests of max_model_len={largest.context} tokens "
            f"takes "
            f"{_mib(table_bytes)} for its slot table and logits, and {_mib(free_bytes)} are free: lower one "
            f"of the two"
        )


def check_slots(
    n_slots: int,
    specs: Sequence[AttentionSpec],
    device: jax.Device,
    *,
    share: float = 1.0,
    workspace_bytes: Callable[[jax.Device], int] = lambda device: 0,
) -> None:
    """``UserError`` with the bytes wanted and there if ``n_slots`` that somebody asked for do not fit on
    ``device``.

    ``share`` as of `slots_that_fit`. What the largest step needs is asked, since that takes compiling it,
    only where KV takes more than half of what is free.
    """
    free_bytes, _ = free_memory_bytes(device)
    room_bytes = free_bytes * (1.0 if is_accelerator(device) else EXPLICIT_FRACTION)
    slot_bytes = sum(spec.slot_bytes for spec in specs) * share
    wanted_bytes = n_slots * slot_bytes
    step_bytes = workspace_bytes(device) if free_bytes < 2 * wanted_bytes <= 2 * room_bytes else 0
    if wanted_bytes + step_bytes > room_bytes:
        step = f" and {_mib(step_bytes)} for the largest step" if step_bytes else ""
        most = int(max(0.0, room_bytes - step_bytes) // slot_bytes)
        raise UserError(
            f"kv_slots={n_slots} take {_mib(wanted_bytes)} of KV{step}, and {_mib(free_bytes)} are free on "
            f"{device}: at most {most} fit; leave kv_slots out to have it chosen"
        )


def slots_up_to(
    n_slots: int,
    specs: Sequence[AttentionSpec],
    device: jax.Device,
    workspace_bytes: Callable[[jax.Device], int],
) -> int:
    """As many of ``n_slots`` that somebody asked for as fit on ``device``, where the rest may go elsewhere.
    Arguments as of `check_slots`."""
    free_bytes, _ = free_memory_bytes(device)
    room_bytes = free_bytes * (1.0 if is_accelerator(device) else EXPLICIT_FRACTION)
    slot_bytes = sum(spec.slot_bytes for spec in specs)
    if 2 * n_slots * slot_bytes > free_bytes:
        room_bytes -= workspace_bytes(device)
    return min(n_slots, int(max(0.0, room_bytes) // slot_bytes))


def check_host_slots(n_host_slots: int, specs: Sequence[AttentionSpec], *, share: float = 1.0) -> None:
    """``UserError`` with the bytes wanted and there if ``n_host_slots`` do not fit in the host's memory."""
    slot_bytes = sum(spec.slot_bytes for spec in specs) * share
    wanted_bytes, free_bytes = n_host_slots * slot_bytes, host_free_bytes()
    if wanted_bytes > free_bytes * EXPLICIT_FRACTION:
        raise UserError(
            f"host_kv_slots={n_host_slots} take {_mib(wanted_bytes)} of host memory, and {_mib(free_bytes)} "
            f"are free: at most {int(free_bytes * EXPLICIT_FRACTION // slot_bytes)} fit"
        )


def _mib(n_bytes: float) -> str:
    return f"{n_bytes / 2**20:,.0f} MiB"


def prompt_batch_tokens(device: jax.Device) -> int:
    """`Capabilities.prompt_batch_tokens` of a model on ``device``. A CPU multiplies for longer than it reads
    from 16 tokens on (docs/findings.md)."""
    return PROMPT_BATCH_TOKENS if is_accelerator(device) else 0
