"""Array sizes that programs are compiled for, as data. Knows nothing of what is compiled.

XLA compiles for exact shapes, so a batch, a prompt or a context is padded up to the next size listed
here; a growing sequence then meets a new program once a bucket and not once a step.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

Cut = Literal["fine", "coarse", "doubling", "few"]
_SHORT_CONTEXT = 2048  # where padding costs the width of a table alone, what is shorter is not told apart


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
    """Batch sizes of a decode step, padded prompt lengths, and padded context lengths (previous tokens).

    ``prefills``: whether a prompt of which no token is stored has programs of its own; if not, it is a chunk
    after no tokens.
    """

    batch: tuple[int, ...]
    prompt: tuple[int, ...]
    context: tuple[int, ...]
    prefills: bool = True

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
        """What is padded at most: of a context an eighth from 512 up ("fine"), a third from 256 up
        ("coarse"), or three quarters from 2,048 up ("doubling", "few"); of a batch from 8 up and of a prompt
        a third, or with "doubling" half, but a third of a batch beyond 128 and of a prompt beyond 256; with
        "few" half of both.

        Where a step is run slice by slice, slices are compiled for (batch) and (prompt), the attend call for
        (batch, context): a tenth of a second each, so "fine". A step that is one program is compiled in
        seconds for each batch and context, and for each prompt and context: "coarse", or "doubling" where
        attention takes no longer for padding, so that a context is no more than the width of a table, and up
        to 128 rows reading the weights is what takes the time (docs/benchmarks.md, products of few rows).
        "few" is for where that is so and compiling is slow: a prompt is a chunk after no tokens there.
        """
        sizes = _batches(max_num_seqs, cut), _prompts(max_model_len, cut), _contexts(max_model_len, cut)
        return cls(*sizes, prefills=cut != "few")

    def fit(self, wanted: StepSizes) -> StepSizes:
        """The sizes that a step of such numbers of rows, tokens and earlier tokens is padded to.
        ``ValueError`` if there are more than buckets hold."""
        alongside = None if wanted.alongside is None else self.fit(wanted.alongside)
        if wanted.kind == "decode":
            batch, context = bucket(wanted.batch, self.batch), bucket(wanted.context, self.context)
            return replace(wanted, batch=batch, context=context, alongside=alongside)
        n_tokens = bucket(wanted.n_tokens, self.prompt)
        if self.prefills and not wanted.context:
            return replace(wanted, kind="prefill", n_tokens=n_tokens)
        return replace(wanted, kind="chunk", n_tokens=n_tokens, context=bucket(wanted.context, self.context))


@dataclass(frozen=True)
class StepSizes:
    """A step's sizes, padded or not. ``batch``: rows, or prompts of one call; ``n_tokens``: of each prompt or
    chunk, 1 for decode; ``context``: earlier
    tokens; ``alongside``: the prompt or chunk that a decode step has with it; ``workers``: prefill workers,
    by their index, of which each has such a prompt or chunk at once; ``of_all``: logits of all tokens, for a
    prompt that is scored; ``own_pace``: a prompt's chunk that prefill workers compute at their own pace, and
    what takes it in."""

    kind: Literal["decode", "prefill", "chunk"]
    batch: int
    n_tokens: int
    context: int
    alongside: StepSizes | None = None
    workers: tuple[int, ...] = ()
    of_all: bool = False
    own_pace: bool = False

    def __str__(self) -> str:
        if self.kind == "decode":
            text = f"decode, batch {self.batch}, context {self.context}"
            return text if self.alongside is None else f"{text}; {self.alongside}"
        text = f"{self.kind}, {self.n_tokens} tokens, context {self.context}{', logits of all' * self.of_all}"
        text += " at own pace" * self.own_pace
        text += f", {self.batch} prompts" * (self.batch > 1)
        return f"{text}, prefill workers {', '.join(map(str, self.workers))}" if self.workers else text

    @property
    def has_prompt(self) -> bool:
        """Whether tokens of a prompt are computed in it."""
        return self.kind != "decode" or self.alongside is not None

    @property
    def buckets(self) -> Buckets:
        """Those that give just these sizes."""
        return Buckets(
            (self.batch,), (max(2, self.n_tokens),), (max(1, self.context),), prefills=self.kind == "prefill"
        )

    @property
    def room(self) -> tuple[int, int]:
        """What a step costs: the rows that go through the model, and the entries of its slot tables."""
        beside = self.alongside.room if self.alongside else (0, 0)
        return self.batch * self.n_tokens + beside[0], self.batch * self.context + beside[1]

    def joined(self, other: StepSizes) -> StepSizes:
        """The smallest that holds both; ``other`` is of this kind, or both are prompts or chunks."""
        alongside = None
        if self.alongside is not None and other.alongside is not None:
            alongside = self.alongside.joined(other.alongside)
        sizes = {
            name: max(getattr(self, name), getattr(other, name)) for name in ("batch", "n_tokens", "context")
        }
        kind = self.kind if self.kind == other.kind else "chunk"
        return replace(self, kind=kind, alongside=alongside, **sizes)

    def holds(self, other: StepSizes) -> bool:
        """Whether a step of ``other`` sizes can be padded to these: a prompt whose first token is its own is
        a chunk, too."""
        if (self.kind == "decode") != (other.kind == "decode") or self.of_all != other.of_all:
            return False
        if self.own_pace != other.own_pace:
            return False
        if self.kind == "prefill" and other.kind == "chunk" and other.context:
            return False
        if (self.alongside is None) != (other.alongside is None) or self.workers != other.workers:
            return False
        if self.alongside and other.alongside and not self.alongside.holds(other.alongside):
            return False
        if self.kind != "decode" and self.batch != other.batch:
            return False
        enough = self.batch >= other.batch and self.n_tokens >= other.n_tokens
        return enough and (self.context >= other.context or self.kind == "prefill")


class CompiledSizes:
    """Which sizes have programs: while others are being compiled, a step is padded to the smallest of these
    that holds it.

    Any thread may `add`; ``wanted``: of each sizes without a program, the rows of padding that it would have
    saved steps, and one for each step.
    """

    def __init__(self, buckets: Buckets) -> None:
        self.buckets = buckets
        self.wanted: Counter[StepSizes] = Counter()
        self._shapes: tuple[StepSizes, ...] = ()

    @property
    def shapes(self) -> tuple[StepSizes, ...]:
        return self._shapes

    def add(self, shapes: Iterable[StepSizes]) -> None:
        self._shapes = tuple(dict.fromkeys((*self._shapes, *shapes)))

    def fit(self, wanted: StepSizes) -> StepSizes:
        """As `Buckets.fit`; sizes that nothing compiled holds are given as they are, to be compiled at
        once."""
        found = self.buckets.fit(wanted)
        if found in self._shapes:
            return found
        taken = _smallest(self._shapes, wanted)
        if taken is None:
            return found
        self.wanted[found] += 1 + max(0, taken.room[0] - found.room[0])
        return taken

    def fit_known(self, wanted: StepSizes) -> StepSizes | None:
        """As `fit`, but None where nothing compiled holds it and other sizes are there."""
        found = self.buckets.fit(wanted)
        if not self._shapes or found in self._shapes:
            return found
        self.wanted[found] += 1
        return _smallest(self._shapes, wanted)

    def chunk_tokens(self, n_tokens: int, context: int, *, mixed: bool) -> int:
        """To how many tokens a prompt's ``n_tokens`` after ``context`` are padded, by themselves or ``mixed``
        with rows, whose number is left out of account."""
        wanted = StepSizes("chunk" if context else "prefill", 1, n_tokens, context)
        found = self.buckets.fit(wanted)
        known = [shape.alongside if mixed else shape for shape in self._shapes if shape.has_prompt]
        prompts = [shape for shape in known if shape is not None and shape.kind != "decode"]
        taken = None if found in prompts else _smallest(prompts, wanted)
        return (taken or found).n_tokens

    def rows(self, n: int) -> int:
        """Rows that ``n`` sequences of one prompt, whose logits are all they have, are padded to."""
        sizes = {bucket(n, self.buckets.batch)}
        known = {shape.batch for shape in self._shapes if shape.kind == "decode" and shape.batch >= n}
        return min(known & sizes or known or sizes)


def _smallest(shapes: Sequence[StepSizes], wanted: StepSizes) -> StepSizes | None:
    """Of those that hold it."""
    holding = [shape for shape in shapes if shape.holds(wanted)]
    return min(holding, key=lambda shape: shape.room, default=None)


def _batches(most: int, cut: Cut) -> tuple[int, ...]:
    if cut == "few":
        return steps(1, most, 1)
    if cut == "doubling":
        return _doubling(1, 128, most)
    small = tuple(n for n in (1, 2, 4) if n < most)
    return (*small, *steps(8, most, 2)) if most > 8 else (*small, most)


def _prompts(most: int, cut: Cut) -> tuple[int, ...]:
    most = max(2, most)
    if cut == "few":
        return steps(32, most, 1)
    return _doubling(32, 256, most) if cut == "doubling" else steps(16, most, 2)


def _doubling(start: int, until: int, stop: int) -> tuple[int, ...]:
    """Up to ``until`` by doubling, then two steps an octave."""
    small = steps(start, min(until, stop), 1)
    return small if stop <= until else (*small[:-1], *steps(until, stop, 2))


def _contexts(most: int, cut: Cut) -> tuple[int, ...]:
    """Steps of 64 up to 512, then eight an octave; 64, 128, then two an octave; or all, a quarter of it, and
    so on down to 2,048."""
    if cut in ("doubling", "few"):
        quarter = -(-most // 4)
        return (*(_contexts(quarter, cut) if quarter >= _SHORT_CONTEXT else ()), most)
    even = {"fine": range(64, 512, 64), "coarse": (64, 128)}[cut]
    start, per_octave = {"fine": (512, 8), "coarse": (256, 2)}[cut]
    few = tuple(n for n in even if n < most)
    return (*few, *(steps(start, most, per_octave) if most > start else (most,)))
