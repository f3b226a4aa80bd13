"""What `bench step` measures, as data: cases, and the ways in which executors are asked to run each.

Reads the options' text, and names executors and ways. Knows the job's layout; no executor, no array and no
clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from jaxlamina.bench.lists import listed, pair, whole_numbers
from jaxlamina.errors import UserError
from jaxlamina.job.cluster import Cluster
from jaxlamina.kv.placement import AUTO, PARTITIONS, LocalShare
from jaxlamina.ranks.cluster_layout import partition_of

# Executors that have new tokens placed by whichever share a way has.
_OF_SEVERAL_SHARES = ("split by requests", "split by tokens")


@dataclass(frozen=True)
class StepCase:
    """B requests of ``context`` stored tokens each."""

    batch: int
    context: int

    def __str__(self) -> str:
        return f"B {self.batch}, {self.context} tokens"


def cases_of(text: str) -> list[StepCase]:
    """From "16x2048,64x4096", as ``--case`` has it; ``UserError`` for other text."""
    what = "like 16x2048,64x4096: requests x stored tokens"
    return [StepCase(*found) for found in listed("--case", text, pair, what)]


def numbers_of(text: str, option: str = "--staggered") -> list[int]:
    """Numbers of at least 2 from "2,4", as ``--staggered`` has them; ``UserError``, naming the option, for
    other text."""
    return whole_numbers(option, text, least=2) if text else []


def shares_of(text: str, option: str = "--shares") -> list[LocalShare]:
    """From "0,0.25,auto", as ``--shares`` has it; ``UserError``, naming the option, for other text."""
    parts = [part.strip() for part in text.split(",") if text]
    try:
        found: list[LocalShare] = ["auto" if x == AUTO else float(x) for x in parts]
    except ValueError:
        found = [-1.0]
    if not all(isinstance(x, str) or 0 <= x <= 1 for x in found):
        raise UserError(f"{option} {text!r} must be shares from 0 to 1, or auto, like 0,0.25,0.5,auto")
    return found


def partitions_of(text: str) -> list[str]:
    """From "heads,tokens", as ``--partitions`` has it; ``UserError`` for other text."""
    found = text.split(",") if text else []
    if wrong := [x for x in found if x not in PARTITIONS]:
        raise UserError(f"--partitions {wrong[0]!r} must be of {', '.join(PARTITIONS)}")
    return found


@dataclass(frozen=True)
class StepOptions:
    """``unsplit``: also one program on one device. ``local``: also the slices called one by one from Python
    in this process. ``staggered``: also split into so many staggered batches; ``mini_batches``: also with
    each layer's messages in so many parts. ``prefill``: also with so many tokens of another prompt, of as
    many tokens as the case's requests have, at its middle. ``n_devices``: also unsplit over so many devices
    of this process, each with its share of the requests, and each with its share of every weight; then
    executors come one after another, each with all of the memory, and ways do not take turns. So they do with
    ``local_attention``, but for shares above 0 by requests and by tokens, which are ways of one executor."""

    cases: Sequence[StepCase]
    dtype: Any
    n_rounds: int
    unsplit: bool = True
    local: bool = False
    staggered: Sequence[int] = ()
    mini_batches: Sequence[int] = ()
    prefill: int = 0
    n_devices: int = 1
    # Shares of the KV on the model rank, and partitions, each of which is measured; none: as the job has it.
    # "auto": what the balance comes to on the case; by heads, as a job has it.
    local_attention: Sequence[LocalShare] = ()
    partitions: Sequence[str] = ()

    @property
    def n_parts(self) -> int:
        """Of the requests, where devices share them out: beside *by requests* there is always *unsplit*."""
        return self.n_devices if self.unsplit else 1

    @property
    def one_by_one(self) -> bool:
        """Executors come one after another, each with all of the memory."""
        return self.n_devices > 1 or bool(self.local_attention)


def check_cut(cases: Sequence[StepCase], staggered: Sequence[int]) -> None:
    """``UserError`` for a number of staggered batches that a case cannot be cut into."""
    for n in staggered:
        for case in cases:
            if case.batch % n:
                raise UserError(f"{case.batch} requests cannot be cut into {n} batches of equal size")


def check_unsplit(cluster: Cluster | None, asked: Mapping[str, Any]) -> None:
    """``UserError`` for an option of a split, by name what was ``asked``, where there are no attention
    workers. None: a process without ranks."""
    dop = (1, 0) if cluster is None else cluster.dop
    if dop[1] == 0 and (given := [name for name, value in asked.items() if value]):
        job = "a process without `jaxlamina launch`" if cluster is None else f"{dop=}"
        raise UserError(f"{given[0]} is about attention workers, of which {job} has none: leave it out")


@dataclass(frozen=True)
class Way:
    """How an executor is asked to run a step: with which of its attributes, and whether a chunk of a prompt
    is computed alongside, or in a step after it."""

    name: str
    options: dict[str, Any]
    chunk: str | None = None  # "alongside", "after" or "own pace"
    decode: str | None = None  # the way of the decode step by itself, where there is a chunk
    # Of the KV on the model rank, where one executor has several shares.
    local_share: LocalShare | None = None
    share: int = 1  # of the case's requests this way takes one part of so many, on a device of its own


def layouts(
    options: StepOptions, cluster: Cluster, n_kv_heads: Sequence[int]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Of executors over ranks: their names, and what they change of the job's cluster. Without attention
    workers it is one, of the unsplit model; ``UserError`` where something is asked for that these do.

    By requests and by tokens one executor has all shares but 0: with that one model ranks keep no KV, and the
    executor has none for it either. Where they may keep some, a few new tokens stay there whatever the share.
    """
    if cluster.n_attention == 0:
        of_split = {"--shares": options.local_attention, "--mini-batches": options.mini_batches}
        check_unsplit(cluster, of_split | {"--staggered": options.staggered})
        yield f"unsplit over {cluster.n_ranks} rank{'s'[: cluster.n_ranks > 1]}", {}
        return
    if not options.local_attention:
        yield "split", {}
        return
    for asked in options.partitions or [cluster.partition]:
        of_several = [x for x in options.local_attention if x != 0 and asked in ("requests", "tokens")]
        for share in options.local_attention:
            if share not in of_several:
                changes = {"partition": asked, "local_attention": share}
                partition = partition_of(replace(cluster, **changes), n_kv_heads)  # type: ignore[arg-type]
                yield f"split by {partition}, {_words(share)}", changes | {"partition": partition}
        if of_several:
            yield f"split by {asked}", {"partition": asked, "local_attention": AUTO}


def ways_of(name: str, options: StepOptions, n_prefill_workers: int = 0, own_pace: bool = False) -> list[Way]:
    """How an executor is asked to run a step."""
    whole, prefill, n_devices = [Way(name, {})], options.prefill, options.n_devices
    cut: list[Way] = []  # with a prompt's chunk only on workers of its own
    if name == "unsplit" and n_devices > 1:  # devices do not meet: one shows what all take
        cut.append(Way(f"unsplit, {n_devices} devices by requests", {}, share=n_devices))
    if name.startswith("split") and options.local_attention:
        numbers, shares = [1, *options.staggered], [x for x in options.local_attention if x != 0]
        if name not in _OF_SEVERAL_SHARES:
            return [Way(f"{name}{staggered_words(n)}", {"n_batches": n}) for n in numbers]
        if AUTO in shares:  # first, so that the balance has been told nothing of other ways' steps
            cut.append(Way(f"{name}, auto", {}, local_share="auto"))
        for share, n in product([x for x in shares if not isinstance(x, str)], numbers):
            if n == 1 or share != 1:  # of what attention workers have nothing of there is nothing to stagger
                how = {"n_batches": n}
                cut.append(Way(f"{name}, {_words(share)}{staggered_words(n)}", how, local_share=share))
        return cut
    if name == "split":
        whole = [
            Way("split, q first", {"q_first": True, "n_batches": 1, "mini_batches": 1}),
            Way("split, q with k, v", {"q_first": False, "n_batches": 1, "mini_batches": 1}),
        ]
        cut += [Way(f"split, {n} staggered", {"n_batches": n}) for n in options.staggered]
        parts = options.mini_batches
        cut += [Way(f"split, {n} mini-batches", {"n_batches": 1, "mini_batches": n}) for n in parts]
    chunks: list[Way] = []
    here = {"prefill_workers": 0} if n_prefill_workers else {}
    for way in whole if prefill and "by weights" not in name else []:  # that one has no step for both
        also = {"alongside": f"with {prefill} alongside", "after": f"then {prefill}"}
        chunks += [
            Way(f"{way.name}, {words}", way.options | here, chunk, way.name) for chunk, words in also.items()
        ]
    for way in [*whole, *cut] if prefill and n_prefill_workers else []:
        words = f"{way.name}, {prefill} on a prefill worker"
        chunks.append(Way(words, way.options | {"prefill_workers": 1}, "alongside", way.name))
        if own_pace:
            all_of_them = way.options | {"prefill_workers": n_prefill_workers}
            on = (
                "a prefill worker"
                if n_prefill_workers == 1
                else f"each of {n_prefill_workers} prefill workers"
            )
            words = f"{way.name}, {prefill} on {on} at its own pace"
            chunks.append(Way(words, all_of_them, "own pace", way.name))
    return whole + cut + chunks


def _words(share: LocalShare) -> str:
    return share if isinstance(share, str) else f"{share:g} local"


def staggered_words(n: int) -> str:
    return f", {n} staggered" if n > 1 else ""
