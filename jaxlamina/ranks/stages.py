"""A pipeline's stages: which model rank runs which slices, and the parameters that these read.

Knows the split model and its parameters' sizes; no rank's process and no array.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from jaxlamina.errors import UserError
from jaxlamina.steps.schedules import balanced
from jaxlamina.workers.model_worker import Like
from splitter import Traced, split


class Stages(NamedTuple):
    ranks: tuple[int, ...]  # of each slice, the model rank that runs it
    params: tuple[frozenset[str], ...]  # of each model rank, what its slices read


def stages_of(traced: Iterable[Traced], like: Mapping[str, Like], n_stages: int) -> Stages:
    """Slices shared out so that the largest stage has as few bytes of parameters as can be.

    A slice's parameters are those that any of the ``traced`` functions reads in it; one that several slices
    read, such as an embedding that is the LM head too, is counted with each. ``like``: arrays or their shapes
    by name, flat. ``UserError`` for more stages than slices.
    """
    names = sorted(like)  # as a dict is flattened
    models = [split(t) for t in traced]
    n_slices = models[0].n + 1
    if n_stages > n_slices:
        raise UserError(
            f"pipeline_parallel={n_stages} is more than the model's {n_slices} slices: take fewer model "
            f"workers"
        )
    reads = [frozenset(names[n] for model in models for n in model.params_read(i)) for i in range(n_slices)]
    ranks = balanced([sum(_n_bytes(like[name]) for name in of_slice) for of_slice in reads], n_stages)
    held = (
        frozenset().union(*(of_slice for of_slice, at in zip(reads, ranks, strict=True) if at == rank))
        for rank in range(n_stages)
    )
    return Stages(ranks, tuple(held))


def _n_bytes(x: Like) -> int:
    return math.prod(x.shape) * int(x.dtype.itemsize)
