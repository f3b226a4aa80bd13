"""How many KV slots fit: from the memory a device has free, or the host where that is the device.

Knows bytes and devices; nothing of models.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import jax

from jaxlamina.errors import UserError
from jaxlamina.workers.attention_worker import AttentionSpec

# An accelerator is ours; a host is shared with everything else that runs there.
ACCELERATOR_FRACTION, HOST_FRACTION = 0.85, 0.1


def slots_that_fit(specs: Sequence[AttentionSpec], device: jax.Device, most: int, least: int) -> int:
    """At most ``most`` slots, as far as a fraction of the device's free memory goes.

    ``UserError`` with the numbers if not even ``least`` fit.
    """
    slot_bytes = sum(spec.slot_bytes for spec in specs)
    free_bytes, fraction = free_memory_bytes(device)
    n = min(most, int(free_bytes * fraction) // slot_bytes)
    if n < least:
        raise UserError(
            f"{fraction:.0%} of the {free_bytes / 2**20:,.0f} MiB free on {device} hold {n} KV slots of {slot_bytes:,} "
            f"bytes, fewer than one request of {least} tokens: lower max_model_len or give kv_slots"
        )
    return n


def free_memory_bytes(device: jax.Device) -> tuple[int, float]:
    """Bytes free where ``device`` keeps its arrays, and the fraction of them that KV may take."""
    stats = device.memory_stats() if device.platform != "cpu" else None
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
