"""How many KV slots fit: from the memory a device has free, or the host where that is the device.

Knows bytes and devices; nothing of models.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import jax

from jaxlamina.errors import UserError
from jaxlamina.workers.spec import AttentionSpec

# An accelerator is ours; a host is shared with everything else that runs there.
ACCELERATOR_FRACTION, HOST_FRACTION = 0.85, 0.1


def slots_that_fit(
    specs: Sequence[AttentionSpec],
    device: jax.Device,
    most: int,
    least: int,
    *,
    share: float = 1.0,
    workspace_bytes: int = 0,
) -> int:
    """At most ``most`` slots, as far as a fraction of the device's free memory goes.

    ``share``: the part of each token's KV that ``device`` keeps. ``workspace_bytes``: what the largest step needs
    there beside KV. ``UserError`` with the numbers if not even ``least`` fit.
    """
    slot_bytes = sum(spec.slot_bytes for spec in specs) * share
    free_bytes, fraction = free_memory_bytes(device)
    n = min(most, int(max(0.0, free_bytes * fraction - workspace_bytes) // slot_bytes))
    if n < least:
        room = f"{fraction:.0%} of the {free_bytes / 2**20:,.0f} MiB free on {device}"
        if workspace_bytes:
            room += f", less {workspace_bytes / 2**20:,.0f} MiB that the largest step needs,"
        raise UserError(
            f"{room} hold {n} KV slots of {slot_bytes:,.0f} bytes, fewer than one request of {least} tokens: "
            "lower max_model_len or give kv_slots"
        )
    return n


# (specs, device, share=…, workspace_bytes=…) -> S: `slots_that_fit` with its other arguments given
HowManySlots = Callable[..., int]


def resolve_slots(
    n_slots: HowManySlots | int,
    specs: Sequence[AttentionSpec],
    devices: Sequence[jax.Device],
    workspace_bytes: Callable[[jax.Device], int] = lambda device: 0,
) -> int:
    """S slots for a worker on each of ``devices`` (which may repeat): as many as the fullest device holds."""
    if isinstance(n_slots, int):
        return n_slots
    n_on = Counter(devices)
    return min(
        n_slots(specs, device, share=n / len(devices), workspace_bytes=workspace_bytes(device))
        for device, n in n_on.items()
    )


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


def host_free_bytes(proc: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory this process may still take: the host's, or its container's if that is less."""
    free = []
    if proc.exists():
        free += [
            int(line.split()[1]) * 1024
            for line in proc.read_text().splitlines()
            if line.startswith("MemAvailable:")
        ]
    limit, used = cgroup / "memory.max", cgroup / "memory.current"
    if limit.exists() and used.exists() and limit.read_text().strip() != "max":
        free.append(int(limit.read_text()) - int(used.read_text()))
    if not free:  # no Linux: all there is, half of it taken for used
        free.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2)
    return max(0, min(free))
