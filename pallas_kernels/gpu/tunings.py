"""Frozen tunings, a table per device: `tunings.toml`, which `jaxlamina bench kernels --tune` writes anew.

A shape that is not in the table gets the most warps whose ring holds three tiles, which is what the table's
rows mostly say, too. Knows no device itself: names come from whoever asks.
"""

from __future__ import annotations

import tomllib
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

from pallas_kernels.gpu.spec import Spec, Tuning

PATH = Path(__file__).with_name("tunings.toml")
SHARED_BYTES = 220 * 1024  # of a Hopper CTA's 227 KiB, less what the compiler keeps for itself
MOST_STAGES = 4


@dataclass(frozen=True)
class Key:
    """What a tuning depends on: the device, how KV is stored, KV heads, head dim, blocks of 8 queries."""

    device: str
    kind: str
    K: int
    H: int
    blocks: int

    @classmethod
    def of(cls, spec: Spec, device: str) -> Key:
        return cls(device, spec.kind, spec.K, spec.H, spec.blocks)


@cache
def table(path: Path = PATH) -> dict[Key, tuple[int, int]]:
    """(warps, stages) by key. Raises ValueError for a field that is not known."""
    found = {}
    for row in tomllib.loads(path.read_text()).get("tuning", []):
        n_warps, n_stages = row.pop("n_warps"), row.pop("n_stages")
        try:
            found[Key(**row)] = n_warps, n_stages
        except TypeError as error:
            raise ValueError(f"{path}: {error}") from error
    return found


def write(found: dict[Key, tuple[int, int]], path: Path = PATH) -> None:
    """The whole table, sorted."""
    lines = ["# Written by `jaxlamina bench kernels --tune`; read by pallas_kernels.gpu.tunings.", ""]
    for key, (n_warps, n_stages) in sorted(found.items(), key=lambda item: str(item[0])):
        fields = asdict(key) | {"n_warps": n_warps, "n_stages": n_stages}
        values = (f'{k} = "{v}"' if isinstance(v, str) else f"{k} = {v}" for k, v in fields.items())
        lines += ["[[tuning]]", *values, ""]
    path.write_text("\n".join(lines))


def tuned(spec: Spec, device: str) -> Tuning:
    """The table's tuning for a spec on a device of `spec.tuning.n_ctas` multiprocessors, or the rule's."""
    known = table().get(Key.of(spec, device))
    if known is not None:
        return Tuning(spec.tuning.n_ctas, *known)
    fitting = candidates(spec)
    return next((t for t in fitting if t.n_stages >= 3), fitting[-1])


def candidates(spec: Spec) -> list[Tuning]:
    """Tunings worth a try that fit shared memory: most warps first, deepest ring first. At least one."""
    # 16 warps leave a thread the registers for one block of queries, and int8 needs the warps: it computes
    # more a byte
    warps = (16, 8, 4) if spec.kind == "int8" and spec.blocks == 1 and spec.H <= 128 else (8, 4)
    out = []
    for n_warps in warps:
        trial = replace(spec, tuning=Tuning(spec.tuning.n_ctas, n_warps, 2))
        most = min(MOST_STAGES, (SHARED_BYTES - trial.barrier_bytes) // trial.stage_bytes)
        out += [Tuning(spec.tuning.n_ctas, n_warps, n) for n in range(most, 1, -1)]
    if not out:
        raise ValueError(f"{spec.K=} {spec.H=}: two tiles of the smallest kernel do not fit shared memory")
    return out
