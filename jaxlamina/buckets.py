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

ContextCut = Literal["fine", "coarse", "doubling"]


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
    def default(cls, max_num_seqs: int, max_model_len: int, contexts: ContextCut = "fine") -> Buckets:
        """A batch wastes at most a third of its rows from 8 up, a prompt as much; a context an eighth from 512 up ("fine"),
        a third from 256 up ("coarse") or half from 512 up ("doubling").

        Where a step is run slice by slice, slices are compiled for (batch) and (prompt), the attend call for (batch,
        context): a tenth of a second each, so "fine". A step that is one program is compiled in seconds for each batch
        and context, and for each prompt and context: "coarse", or "doubling" where attention takes no longer for padding.
        """
        small = tuple(n for n in (1, 2, 4) if n < max_num_seqs)
        batch = (*small, *steps(8, max_num_seqs, 2)) if max_num_seqs > 8 else (*small, max_num_seqs)
        return cls(batch, steps(16, max(2, max_model_len), 2), _contexts(max_model_len, contexts))


def _contexts(max_model_len: int, cut: ContextCut) -> tuple[int, ...]:
    """Steps of 64 up to 512, then eight an octave; 64, 128, then two an octave; or from 512 on one an octave."""
    even = {"fine": range(64, 512, 64), "coarse": (64, 128), "doubling": ()}[cut]
    start, per_octave = {"fine": (512, 8), "coarse": (256, 2), "doubling": (512, 1)}[cut]
    few = tuple(n for n in even if n < max_model_len)
    return (*few, *(steps(start, max_model_len, per_octave) if max_model_len > start else (max_model_len,)))
