"""Array sizes that programs are compiled for, as data. Knows nothing of what is compiled.

XLA compiles for exact shapes, so a batch, a prompt or a context is padded up to the next size listed
here; a growing sequence then meets a new program once a bucket and not once a step.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

Cut = Literal["fine", "coarse", "doubling"]


def bucket(n: int, sizes: Sequence[int]) -> int:
    """The smallest of ``sizes`` (rising) that holds ``n``; ``ValueError`` if none does."""
    at = bisect_left(sizes, n)
    if n < 0 or at == len(sizes):
        raise ValueError(f"{n=} must be within 0 … {sizes[-1]}, the largest bucket")
    return sizes[at]


def steps(start: int, stop: int, per_octave: int) -> tuple[int, ...]:
    """``start`` and on, each doubling cut in ``per_octave`` equal steps, up to one that is ``stop`` exactly.

    >>> steps(16, 100, 2)
    (16, 24, 32, 48, 64, 96, 100)
    """
    if not (1 <= start and 1 <= stop and 1 <= per_octave):
        raise ValueError(f"{start=}, {stop=} and {per_octave=} must be at least 1")
    sizes, size = [], start
    while size < stop:
        sizes.append(size)
        octave = start * 2 ** ((size // start).bit_length() - 1)
        size += max(1, octave // per_octave)
    return (*sizes, stop)


@dataclass(frozen=True)
class Buckets:
    """Batch sizes of a decode step, padded prompt lengths, and padded context lengths (previous tokens)."""

    batch: tuple[int, ...]
    prompt: tuple[int, ...]
    context: tuple[int, ...]

    def __post_init__(self) -> None:
        for name in ("batch", "prompt", "context"):
            sizes = getattr(self, name)
            if not sizes or sizes[0] < 1 or any(a >= b for a, b in pairwise(sizes)):
                raise ValueError(f"{name} buckets {sizes} must be positive and rising")
        if self.prompt[0] < 2:
            raise ValueError(
                f"prompt buckets {self.prompt} must start at 2: one token a row is a decode step"
            )

    @classmethod
    def default(cls, max_num_seqs: int, max_model_len: int, cut: Cut = "fine") -> Buckets:
        """What is padded at most: of a context an eighth from 512 up ("fine"), a third from 256 up ("coarse") or half from
        512 up ("doubling"); of a batch from 8 up and of a prompt a third, or with "doubling" half, but a third of a batch
        beyond 128 and of a prompt beyond 256.

        Where a step is run slice by slice, slices are compiled for (batch) and (prompt), the attend call for (batch,
        context): a tenth of a second each, so "fine". A step that is one program is compiled in seconds for each batch
        and context, and for each prompt and context: "coarse", or "doubling" where attention takes no longer for padding
        and up to 128 rows reading the weights is what takes the time (docs/benchmarks.md, products of few rows).
        """
        return cls(_batches(max_num_seqs, cut), _prompts(max_model_len, cut), _contexts(max_model_len, cut))


def _batches(most: int, cut: Cut) -> tuple[int, ...]:
    if cut == "doubling":
        return _doubling(1, 128, most)
    small = tuple(n for n in (1, 2, 4) if n < most)
    return (*small, *steps(8, most, 2)) if most > 8 else (*small, most)


def _prompts(most: int, cut: Cut) -> tuple[int, ...]:
    most = max(2, most)
    return _doubling(32, 256, most) if cut == "doubling" else steps(16, most, 2)


def _doubling(start: int, until: int, stop: int) -> tuple[int, ...]:
    """Up to ``until`` by doubling, then two steps an octave."""
    small = steps(start, min(until, stop), 1)
    return small if stop <= until else (*small[:-1], *steps(until, stop, 2))


def _contexts(most: int, cut: Cut) -> tuple[int, ...]:
    """Steps of 64 up to 512, then eight an octave; 64, 128, then two an octave; or from 512 on one an octave."""
    even = {"fine": range(64, 512, 64), "coarse": (64, 128), "doubling": ()}[cut]
    start, per_octave = {"fine": (512, 8), "coarse": (256, 2), "doubling": (512, 1)}[cut]
    few = tuple(n for n in even if n < most)
    return (*few, *(steps(start, most, per_octave) if most > start else (most,)))
