"""What a rank does in a step, as data. A plan is a list of these for each rank; interpreters run them, and
checks and drawings read them. Pure.

A batch is what goes through the slices together, counted from 0 within the step; layers are attention
operators.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

POOL = -1
"""As a peer: all attention workers."""

FRONT = 0
"""The rank that wants the logits."""


class Payload(NamedTuple):
    """What one message carries. Messages of a batch's rows may go in parts; ``out`` is attention output, or
    what of it the stored tokens give; of logits ``layer`` is the number of layers."""

    what: Literal["q", "kv", "qkv", "out", "logits"]
    batch: int
    layer: int
    part: int = 0


@dataclass(frozen=True)
class RunSlice:
    """A slice before the last one: all of it, or as far as q, or from there on to k and v."""

    batch: int
    index: int
    piece: Literal["whole", "q", "kv"] = "whole"


@dataclass(frozen=True)
class Logits:
    """The last slice, of one batch or of several together."""

    batches: tuple[int, ...]


@dataclass(frozen=True)
class Attend:
    """Attention. On a model rank: of prompts' new tokens among themselves, and over what it has stored
    itself. On an attention worker: over what it has stored. Either adds the new tokens where they are part of
    its answer."""

    batch: int
    layer: int
    part: int = 0


@dataclass(frozen=True)
class Append:
    """The new tokens' keys and values are stored: on an attention worker, or on a model rank that keeps a
    share of the KV."""

    batch: int
    layer: int
    part: int = 0


@dataclass(frozen=True)
class Send:
    payload: Payload
    peer: int


@dataclass(frozen=True)
class Receive:
    payload: Payload
    peer: int


@dataclass(frozen=True)
class Swap:
    """Both at once, with one peer."""

    send: Payload
    receive: Payload
    peer: int


@dataclass(frozen=True)
class HandOver:
    """A batch's context before a slice goes from one model rank to the next; in both ranks' lists. With it
    goes the attention output that ``source`` has put together, or q, k and v, of which ``target`` adds the
    new tokens' own attention, or neither. ``local``: and what ``source`` has attended to itself, unless it is
    in the output."""

    batch: int
    slice: int
    source: int
    target: int
    carries: Literal["out", "qkv", "nothing"]
    local: bool = False


Task: TypeAlias = RunSlice | Logits | Attend | Append | Send | Receive | Swap | HandOver
