"""Rank 0's executor: steps as whole programs over real ranks, with the same interface as `LocalExecutor`.

Gives every step its bucket, tells the attention ranks which slots the step is about, and starts its own
program. Before a bucket's first step `jaxlamina.run.matched_programs` has all ranks compile it, and compares
what they will exchange. With "auto" `jaxlamina.run.auto_staggering` finds as how many staggered batches rows
go; where the share of attention on model ranks follows the load (`jaxlamina.run.attention_share`),
`jaxlamina.run.balance` does. Knows the model and the memory pool's layout; what KV looks like is the
attention ranks' affair, and how tensors travel the transport's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, zip_longest
from typing import Any

import jax
import msgspec
import numpy as np

from jaxlamina.errors import UserError
from jaxlamina.job.cluster import Cluster
from jaxlamina.job.control import messages as m
from jaxlamina.job.control.sockets import parse_address
from jaxlamina.job.group import Group
from jaxlamina.kv.kept import KeptFound, KeptWanted, Lost
from jaxlamina.kv.kv_worker import KVWorker, LayersApart
from jaxlamina.kv.placement import AUTO, Held, checked_partition
from jaxlamina.kv.pool_book import PoolBook, stored_slots
from jaxlamina.models.causal_lm import CausalLM
from jaxlamina.process.compile_counts import Programs
from jaxlamina.ranks.cluster_layout import layout_of, local_share_of, partition_of, q_first_of, wishes_of
from jaxlamina.ranks.kv_copies import RankCopies, copies_at
from jaxlamina.ranks.model_rank import told_replica
from jaxlamina.ranks.model_side import ModelSide, shards_of
from jaxlamina.ranks.remote_worker import RemoteWorker, SlotTables
from jaxlamina.ranks.shards import shard_like, shard_model
from jaxlamina.ranks.wires import local_spec
from jaxlamina.run.attention_share import AttentionShare, speeds_of
from jaxlamina.run.auto_staggering import AutoStaggering
from jaxlamina.run.balance import Balance
from jaxlamina.run.executor import Capabilities, Executor, StepLogits
from jaxlamina.run.matched_programs import MatchedPrograms, Own
from jaxlamina.run.modelled import ModelledSteps
from jaxlamina.run.parts import Part, computed_part, mixed_part, prompts_part, rows_part
from jaxlamina.run.set_up import (
    SlotsWanted,
    WeightShares,
    allocate,
    others_with_kv,
    set_up_prompts,
    setup_of,
    share_out,
)
from jaxlamina.steps.batch import DecodeBatch, PrefillBatch, levelled
from jaxlamina.steps.buckets import Cut
from jaxlamina.steps.plans import why_not
from jaxlamina.steps.shape import StepShape
from jaxlamina.steps.step import PromptPart, Step
from jaxlamina.workers.calibration import Calibration, channel_scales
from jaxlamina.workers.capacity import prompt_batch_tokens
from jaxlamina.workers.kv_pools import Slots, as_slots
from jaxlamina.workers.model_worker import ModelFn, ModelWorker, Params
from jaxlamina.workers.spec import bucket_cut, specs_of, windows_of
from jaxlamina.workers.workspace import LargestStep
from splitter import SplitReport

_log = logging.getLogger("uvicorn.error")  # the server's log
_WHY_NO_SHARE = (
    "model workers that share out weights keep no KV; with partition='heads' each keeps half of its heads', "
    "where heads can be shared out so"
)


def _nothing(_: float) -> None:
    pass


class RanksExecutor(Executor):
    """A model worker in this process, attention workers in others.

    - ``group``: as `jaxlamina.ranks.join` gives it; its cluster says partition, transport and deadlines.
    - ``kv_slots``: tokens whose KV is kept; None: as many as fit, between ``least_slots`` and ``most_slots``.
    - ``config``: what ``model`` is `jaxlamina.models.apply` of; other model ranks, where there are any, make
      theirs of it, and a partition "auto" of the cluster is chosen by its KV heads.
    - ``kv_dtype``, ``n_host_slots``, ``calibration``, ``largest``: as of `LocalExecutor`.

    - ``modelled``: what the planner's cost model says of this executor's steps, where it knows them.
    - ``cluster``: the group's, with another partition or share of local attention.

    Attributes for steps from now on: ``q_first``, whether q is sent before k and v are computed;
    ``mini_batches``, as the cluster's; ``n_batches``, as how many staggered batches a decode step of at least
    as many rows runs (Lamina 2025 §4.3; "auto": see `AutoStaggering`); q goes with k and v there;
    ``prefill_workers``, how many of the cluster's compute prompts. With none model ranks do.

    ``UserError`` for what cannot be; a rank that fails ends this process (`jaxlamina.job.group.Failing`).
    """

    def __init__(
        self,
        model: ModelFn,
        params: Params,
        *,
        group: Group,
        kv_slots: int | None,
        most_slots: int,
        least_slots: int,
        largest: LargestStep,
        kv_dtype: str = "auto",
        n_host_slots: int | None = 0,
        calibration: Calibration | None = None,
        source: CausalLM | None = None,
        cluster: Cluster | None = None,
        modelled: ModelledSteps | None = None,
    ) -> None:
        self.group, self.modelled = group, modelled
        self.programs = Programs()
        cluster = cluster or group.cluster
        like = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in params.items()}
        known_heads = () if source is None else source.kv_heads
        partition = partition_of(cluster, known_heads)
        self._shares = WeightShares(group, model, params)
        shared = self._shares.shared
        share = local_share_of(cluster, partition, known_heads, shared.why_not)
        if cluster.local_attention == AUTO and cluster.tensor_parallel > 1 and not share:
            _log.info("local_attention='auto': %s", _WHY_NO_SHARE)
        own = share_out(group, self._shares, params, source, kv_dtype, partition, share)
        heads_over = shared.heads_over
        self.layout = layout_of(cluster, partition, self._shares.stages.ranks, share, heads_over)
        own_model = shard_model(model, like, shared, 0)
        self.model = ModelWorker(own_model, own, group.device, shard_like(like, shared))
        one_row = self.model.split(1)
        self.report: SplitReport = one_row.report()
        if shared.why_not:
            _log.info("the first model worker alone talks to attention workers: %s", shared.why_not)
        self.specs = specs_of(one_row.sites, kv_dtype, heads_over)
        kv_heads = [spec.n_kv_heads for spec in self.specs]
        checked_partition(partition, len(group.workers), kv_heads, share, cluster.tensor_parallel)
        # The other pool's devices are not known here, but that they are of the same platform.
        self._bucket_cut: Cut = bucket_cut(self.specs, group.device) if cluster.is_one_platform else "coarse"
        self.q_first = q_first_of(cluster, group.transport)
        self.n_batches = cluster.n_batches_on(group.device.platform)
        self.latest_n_batches = 1  # of the last decode step
        self.mini_batches = cluster.mini_batches
        self.prefill_workers = cluster.prefill_workers
        self._own_pace_tokens = cluster.prefill_chunk if cluster.prefill_pace == "own" else 0
        self._local_prefill_tokens = cluster.local_prefill_tokens
        self._at_work: dict[int, int] = {}  # by chunk, the worker's index
        self._auto = AutoStaggering(
            group, self.layout, self.model, self.specs, modelled, (1, cluster.usual_n_batches)
        )
        known = model, params, self.specs, calibration
        with jax.default_device(group.load_device):  # the whole model runs, so where all of it is
            scales = channel_scales(*known, n_positions=largest.context)
        wanted = SlotsWanted(kv_slots, most_slots, least_slots, n_host_slots)
        heads = [heads_over * site.q.shape[2] for site in one_row.sites]
        setup = setup_of(self.specs, heads, self.layout, cluster.token_block, wanted, largest, scales)
        shards = shards_of(cluster)
        self._side = ModelSide(group.transport, self.model, self.layout, self.specs, 0, shards, source)
        keeps_kv = self.layout.attends_locally
        own_room = partial(self._side.slots_found, setup, cluster.n_ranks) if keeps_kv else lambda: None
        follows_load = share == AUTO and keeps_kv and not self.layout.by_heads
        room = allocate(group, setup, self.layout, own_room, measure=follows_load)
        self.n_slots, self.n_host_slots = room.n_slots, room.n_host_slots
        if keeps_kv:
            self._side.allocate(room.each[-1], room.n_host_slots, scales)
        self.balance: Balance | None = None
        if follows_load:
            n = self.n_batches
            numbers = (1, cluster.usual_n_batches) if isinstance(n, str) else (n,)
            known_slices = {} if modelled is None else {"predict": modelled.slices_s}
            self.balance = Balance(
                speeds_of(group, self._side, room, heads, modelled), numbers, **known_slices
            )
        self.attention_share = AttentionShare(self.layout, self.specs, self.balance, modelled)
        following = None if self.balance is None else self.attention_share.wanted
        # Whether model ranks have room for all, and nothing is gained by attention workers.
        self._all_local = bool(follows_load and room.shared_host and room.each[-1] >= room.n_slots)
        self._epoch = group.epoch
        others = others_with_kv(group, self.layout, len(self.specs)) if keeps_kv else ()
        self._tables = {rank: SlotTables() for rank in (*group.workers, *others)}
        sizes = self.n_slots, self.n_host_slots, cluster.token_block
        self.pool = PoolBook(
            self._kv_workers(others),
            self.layout,
            windows_of(self.specs),
            *sizes,
            wishes_of(self.layout, cluster.token_block, share, following),
            room.each,
        )
        if self.prefill_workers and self._own_pace_tokens:
            set_up_prompts(group, largest.context, setup)
        self._copies = RankCopies(group.cluster, 0, parse_address(group.control.address)[0])
        self.matched = MatchedPrograms(group, self._side, self.programs)
        self._start = group.transport.bind(jax.device_put(np.zeros(1, np.int32), group.device))

    def _kv_workers(self, others: Sequence[int]) -> list[KVWorker]:
        """The attention workers, and last what model ranks keep, this one and ``others``: stages together, of
        whose layers each token has some on each; shards one by one, by heads as attention workers."""
        workers = self.group.workers if self.layout.has_pool else ()
        self._remote = {rank: RemoteWorker(self.group, rank) for rank in (*workers, *others)}
        found: list[KVWorker] = [self._remote[rank] for rank in workers]
        if self._side.kv is None:
            return found
        each: list[KVWorker] = [self._side.kv, *(self._remote[rank] for rank in others)]
        if len(each) == 1 or not self.layout.stages:
            return found + each
        layers = [self.layout.local_layers(rank, len(self.specs)) for rank in (0, *others)]
        own = [local_spec(self.layout, spec).slot_bytes for spec in self.specs]
        row_bytes = [sum(own[i] for i in of_rank) for of_rank in layers]
        return [*found, LayersApart(each, [*map(len, layers)], row_bytes)]

    @property
    def device(self) -> jax.Device:
        return self.group.device

    @property
    def capabilities(self) -> Capabilities:
        """Programs cannot be compiled behind where they depend on where tokens lie in more than a few ways,
        or on prefill workers."""
        places_tokens = self.pool.placement is not None
        batches_prompts = not places_tokens
        # By default as the exactness gate has shown it on GPUs: messages by memory, one model rank (and there
        # one attention rank).
        by_default = batches_prompts and self.group.transport.by_memory and not self.group.replicas
        return Capabilities(
            bucket_cut=self._bucket_cut,
            n_prefill_workers=self.prefill_workers,
            own_pace_tokens=self._own_pace_tokens if self.prefill_workers else 0,
            local_prefill_tokens=self._local_prefill_tokens if self.prefill_workers else 0,
            places_tokens=places_tokens,
            compiles_behind=not self.prefill_workers and (not places_tokens or self.pool.has_few_shapes),
            batches_prompts=batches_prompts,
            prompt_batch_tokens=prompt_batch_tokens(self.device) if by_default else 0,
            rounds_kv=any(spec.rounds for spec in self.specs),
            why_not_mixed=why_not(self.layout, self._mixed_like),
        )

    def run(self, step: Step) -> StepLogits:
        """Where there are prefill workers, they compute prompts meanwhile (Lamina 2025 §5). Else a prompt
        alongside rows is in their program, one a rank, which reads weights once for both (Lamina 2024 §5.6):
        each of its tokens is a row of the model, so one that goes by a row's largest position (dynamic rope
        scaling) sees its own. What else there is of prompts runs after the rows."""
        self._check_current()
        if ready := [part for part in step.prompts if part.ready]:
            if step.decodes is not None or len(step.prompts) > 1:
                raise ValueError("what is computed already is taken in by a step of its own")
            return self._take_in(ready[0])
        if self.prefill_workers and step.prompts:
            return self._run_beside(step)
        together = step.alongside is not None and not self.capabilities.why_not_mixed
        return StepLogits.joined([self._run_part(part) for part in ([step] if together else step.apart)])

    def put_weights(self, params: Params) -> None:
        self._check_current()
        self._shares.send(params, lambda rank: m.NewWeights())
        self.matched.put_weights(self._shares.of(params, 0))

    def _run_part(self, step: Step) -> StepLogits:
        if step.decodes is None:
            [prompt] = step.prompts
            return StepLogits(None, tuple(self._launch([self._prompts(prompt)])))
        if step.alongside is not None:
            [logits] = self._launch([self._with_chunk(step.decodes, step.alongside)])
            return StepLogits(logits[:-1], (logits[-1:],))
        rows, on_done = self._rows(step.decodes)
        self.latest_n_batches = rows.shape.n_batches
        [logits] = self._launch([rows], on_done)
        return StepLogits(_without_padding(logits, step.decodes))

    def _run_beside(self, step: Step) -> StepLogits:
        """The rows, and meanwhile each prompt on its prefill worker. One may follow tokens of one before
        it."""
        if here := self._not_for_prefill_workers(step):
            # A prefill worker does not reach what model ranks keep, so they go on from there themselves.
            there = tuple(part for part in step.prompts if id(part) not in map(id, here))
            beside = self.run(Step(step.decodes, there)) if step.decodes is not None or there else None
            alone = {id(part): self._run_part(Step(prompts=(part,))).prompts[0] for part in here}
            found = iter(() if beside is None else beside.prompts)
            each = tuple(alone[id(part)] if id(part) in alone else next(found) for part in step.prompts)
            return StepLogits(None if beside is None else beside.decodes, each)
        batch = step.decodes
        batches = {part.worker: part.batch for part in step.prompts if part.worker is not None}
        if len(batches) != len(step.prompts):
            raise ValueError("a prefill worker computes one prompt or chunk a step")
        parts = [] if batch is None else [self._rows(batch, self._settled_n_batches(batch))[0]]
        scored = {part.worker for part in step.prompts if part.scored}
        if self.layout.by_heads:  # programs are few then, and the step lasts as long as its largest prompt
            # A prompt that is scored is left as small as it is: every token's logits are a row of the
            # vocabulary.
            others = {worker: prompt for worker, prompt in batches.items() if worker not in scored}
            batches |= dict(zip(others, levelled([*others.values()], self.n_slots), strict=True))
        for worker, prompt in batches.items():
            # The intake is one message, so that it is over soon.
            how: dict[str, Any] = {"scored": worker in scored, "rank": self.group.prefill_ranks[worker]}
            parts.append(prompts_part(self.pool, prompt, q_first=False, **how))
        logits = self._launch(parts)
        rows = None if batch is None else _without_padding(logits.pop(0), batch)
        return StepLogits(rows, tuple(logits))

    def _not_for_prefill_workers(self, step: Step) -> list[PromptPart]:
        """Prompts that attention workers have no room for beside the step's other new tokens, or that follow
        what they do not have, and those that model ranks are asked for."""
        found: list[PromptPart] = []
        elsewhere: set[int] = set()  # slots of theirs, which are written after the others
        n_taken = 0 if step.decodes is None else self.pool.new_slots(step.decodes).size
        for part in step.prompts:
            new = self.pool.new_slots(part.batch)
            follows = not elsewhere.isdisjoint(stored_slots(part.batch).tolist())
            if part.worker is not None and not follows and self.pool.is_for_workers(part.batch, n_taken):
                n_taken += new.size
            else:
                found.append(part)
                elsewhere.update(new.tolist())
        return found

    def begin_prompt(self, part: PromptPart) -> None:
        """The worker knows its tokens' KV by position; slots are the attention ranks' affair."""
        self._check_current()
        batch, group = part.batch, self.group
        assert part.worker is not None
        rank = group.prefill_ranks[part.worker]
        chunk = group.chunks.begin(group.cluster.describe(rank))
        self._at_work[chunk] = part.worker
        tokens, positions, logits_at = map(m.Array.of, (batch.tokens, batch.positions, batch.logits_at))
        start = int(batch.lengths[0])
        group.send(rank, m.Compute(chunk, start, tokens, positions, logits_at, part.scored))

    def computed(self, wait_s: float = 0.0) -> list[int]:
        found: list[int] = []
        for chunk in self.group.chunks.computed(wait_s if self._at_work else 0.0):
            if chunk in self._at_work:  # else another model's
                found.append(self._at_work.pop(chunk))
        return found

    def _take_in(self, part: PromptPart) -> StepLogits:
        """What comes of a chunk is on its prefill worker: it goes to attention ranks between two steps of the
        rows, while model ranks are at a step's last slice and the next one's first, and by programs that are
        few. Model ranks compute it again where attention workers have no room for it."""
        assert part.worker is not None
        if part.worker in self._at_work.values():
            raise ValueError(f"prefill worker {part.worker} has not computed it yet")
        if not self.pool.workers_have_room(part.batch):
            return self._run_part(Step(prompts=(replace(part, ready=False),)))
        rank = self.group.prefill_ranks[part.worker]
        logits = self._launch([computed_part(self.pool, part.batch, scored=part.scored, rank=rank)])
        return StepLogits(None, tuple(logits))

    def candidates(self, n_rows: int, context: int) -> tuple[int, ...]:
        """How many staggered batches a decode step of so many rows and earlier tokens a row may run as: one
        number, or those that are tried."""
        if self.n_batches == "auto":
            return self._auto.candidates(n_rows, context)
        return (self.n_batches if n_rows >= self.n_batches else 1,)

    def held(self) -> list[Held]:
        return self.pool.held()

    def staggering(self) -> dict[str, Any]:
        """How decode steps are staggered: ``n_batches``, and where that is "auto" of each bucket the number
        chosen, from what (``by``: "measurement", or before it "prediction", or None while candidates are
        tried out without one), and the seconds of a step by number of batches: measured medians, and those
        predicted. ``origin``: where predictions are from; None without any."""
        chosen = self._auto.found() if self.n_batches == "auto" else []
        origin = None if self.modelled is None else self.modelled.origin
        return {"n_batches": self.n_batches, "chosen": chosen, "origin": origin}

    def local_attention(self) -> dict[str, Any] | None:
        """How attention is shared between the pools; None where model ranks keep no KV. ``share``: of the
        tokens that the last decode step attended to, those on model ranks, and ``wanted`` what it is to be;
        by heads that is one number. With "auto" also the times that it is chosen by (`Balance.state`)."""
        return self.attention_share.state(self.pool.wishes)

    def _settled_n_batches(self, batch: DecodeBatch) -> int:
        """Staggered batches of a step whose time says nothing of them."""
        bucket = n_rows, _ = len(batch.tokens), batch.slot_table.shape[1]
        possible = self.candidates(*bucket)
        return possible[0] if len(possible) == 1 else self._auto.choice.settled(bucket, n_rows)

    def _rows(self, batch: DecodeBatch, n_batches: int | None = None) -> tuple[Part, Callable[[float], None]]:
        """A decode step as ``n_batches``, or as it is its turn, its rows padded to whole staggered batches or
        mini-batches; and who is to be told its seconds."""
        bucket = n_rows, _ = len(batch.tokens), batch.slot_table.shape[1]
        on_done: Callable[[float], None] = _nothing
        if n_batches is None and self.balance is not None:
            wishes = self.pool.wishes
            possible = self.candidates(*bucket)
            n_batches = self.balance.n_batches(n_rows, wishes.n_local, wishes.n_remote, possible)
        elif n_batches is None:
            possible = self.candidates(*bucket)
            n_batches = possible[0]
            if len(possible) > 1:
                n_batches = self._auto.choice.next(bucket, n_rows)
                on_done = partial(self._auto.choice.took, bucket, n_batches)
        mini_batches = self.mini_batches if n_batches == 1 and n_rows >= self.mini_batches else 1
        n_parts = max(n_batches, mini_batches)
        batch = batch.padded(-(-n_rows // n_parts) * n_parts, self.n_slots)
        q_first = self.q_first and n_parts == 1
        cut = {"n_batches": n_batches, "mini_batches": mini_batches}
        part = rows_part(self.pool, batch, q_first=q_first, **cut)
        if self.balance is not None:
            wishes, n = self.pool.wishes, part.shape.n_batches
            self.attention_share.say(wishes, n)
            return part, partial(self.balance.took, n_rows, n, wishes.n_local, wishes.n_remote)
        # Of what attention workers have nothing of there is nothing to stagger, and its time says nothing.
        return part, on_done if part.shape.n_batches == n_batches else _nothing

    def _prompts(self, prompt: PromptPart) -> Part:
        return prompts_part(self.pool, prompt.batch, q_first=self.q_first, scored=prompt.scored)

    def _with_chunk(self, rows: DecodeBatch, chunk: PrefillBatch) -> Part:
        return mixed_part(self.pool, rows, chunk, q_first=self.q_first)

    def copy_slots(self, src: Slots, dst: Slots) -> None:
        self._check_current()
        self.pool.copy_slots(as_slots(src), as_slots(dst))

    def move_out(self, slots: Slots, host_slots: Slots) -> None:
        self._check_current()
        self.pool.move_out(as_slots(slots), as_slots(host_slots))

    def move_in(self, host_slots: Slots, slots: Slots) -> None:
        self._check_current()
        self.pool.move_in(as_slots(host_slots), as_slots(slots))

    def open_kept(self, wanted: KeptWanted) -> KeptFound:
        self._check_current()
        replicas = self.group.cluster.kv_replicas
        wanted = wanted._replace(n_sharing=self.group.cluster.n_ranks * (1 + replicas))
        at: dict[int, str] = {}
        folder = None if wanted.ahead else wanted.folder
        if replicas and folder is not None:  # else KV does not outlive this process
            at = copies_at(self.group, self._copies, tuple(self._remote), folder, wanted.n_sharing)
        for rank, worker in self._remote.items():
            worker.copy_at = at.get(rank)
        return self.pool.open_kept(wanted)

    def keepers_of(self, slots: Slots) -> np.ndarray:
        return self.pool.keepers_of(as_slots(slots))

    @property
    def n_behind(self) -> int:
        return self.pool.n_behind

    def take_lost(self, places: Slots) -> Lost:
        return self.pool.take_lost(as_slots(places))

    def keep(self, slots: Slots, places: Slots, marks: np.ndarray) -> None:
        self._check_current()
        self.pool.keep(as_slots(slots), as_slots(places), marks)

    def bring(self, places: Slots, slots: Slots) -> None:
        self._check_current()
        self.pool.bring(as_slots(places), as_slots(slots))
        for worker in self._remote.values():  # so that it is known how long that took
            worker.kept_rows(as_slots(()))

    def release(self, slots: Slots) -> None:
        self.pool.release(as_slots(slots))

    def compile_later(self, step: Step, *, behind: bool = False) -> Callable[[], Any] | None:
        """In each number of staggered batches that is tried; the other ranks begin with theirs, too."""
        few = self.attention_share.is_alone and not behind
        ahead = [part.shape for part in self._parts_ahead(step, all_local=few)]
        return self.matched.compile_later(ahead, behind)

    def prepare(self, step: Step) -> bool:
        """Finds that the ranks' programs match; False while another rank is compiling its own."""
        return self.matched.are_ready(part.shape for part in self._parts_ahead(step))

    def _parts_ahead(self, step: Step, all_local: bool = False) -> list[Part]:
        """All that a step of such sizes may run as, on padding: where its tokens lie, and so whether
        attention workers take part, is not known yet."""
        if not self.capabilities.compiles_behind:
            return []
        if step.decodes is None:
            parts = [self._prompts(prompt) for prompt in step.prompts]
        elif step.alongside is None:
            numbers = self.candidates(len(step.decodes.tokens), step.decodes.slot_table.shape[1])
            parts = [self._rows(step.decodes, n)[0] for n in numbers]
        elif self.capabilities.why_not_mixed:
            parts = []
        else:
            parts = [self._with_chunk(step.decodes, step.alongside)]
        if self.pool.placement is None:
            return parts
        numbers = (1,) if step.decodes is None or step.alongside else numbers
        found: dict[StepShape, Part] = {}
        for part in parts:
            for rows in self.pool.ways_of(part.rows, numbers, all_local=all_local or self._all_local):
                found.setdefault(rows.shape, part._replace(rows=rows))
        return list(found.values())

    def rehearse(self, step: Step) -> None:
        """In all the ways that `compile_later` has them."""
        for part in self._parts_ahead(step):
            if part.shape in self.matched:
                jax.block_until_ready(self._launch([part]))

    def stay_alone(self, alone: bool) -> bool:
        return self.attention_share.stay_alone(alone)

    def rehearse_moves(self, n: int) -> None:
        self._check_current()
        self.pool.rehearse_moves(n)

    @property
    def _mixed_like(self) -> StepShape:
        """A decode step with a prompt, cut up as such steps are here."""
        n = 1 if self.n_batches == "auto" else self.n_batches
        chunk = StepShape("chunk", 1, 1, 1)
        return StepShape("decode", 1, 1, 1, n_batches=n, mini_batches=self.mini_batches, chunk=chunk)

    def place_by(self, share: float) -> None:
        """New tokens go by this share of the KV on model ranks from now on; by requests or tokens."""
        self.pool.wishes.share = lambda _: share

    def assume_stored(self, batch: DecodeBatch | PrefillBatch) -> None:
        self.pool.assume_stored(batch)

    def _launch(self, parts: Sequence[Part], on_done: Callable[[float], None] = _nothing) -> list[jax.Array]:
        """Each part's logits."""
        head, *beside = parts
        shape = msgspec.structs.replace(head.shape, prefills=tuple(part.shape for part in beside))
        if shape not in self.matched:  # its program is compiled here
            self.on_launch()
        own = self.matched.of(shape)
        workers = self.matched.workers_in(shape)
        ticket = self.group.begin_step(shape, workers)
        self.group.owed = f"step {self.group.n_steps} ({shape})"
        for rank, *of_parts in zip(workers, *(part.rows.slots for part in parts), strict=False):
            told = self._tables[rank].as_message(list(chain(*of_parts)))
            self.group.send(rank, m.RunStep(self.group.n_steps, self._epoch, shape, *told))
        for part in parts:
            local, others = part.rows.local, self.group.model_ranks_in(part.shape)
            inputs = told_replica(self._known(part), part.rows.at, len(local)) if others else ()
            for rank in others:
                tables = self._tables.get(rank) if local else None
                arrays, changes = ((), ()) if tables is None else tables.as_message(local)
                pairs: Iterable[Any] = zip_longest(inputs, arrays, fillvalue={})
                segments = tuple({**own, **more} for own, more in pairs)
                self.group.send(rank, m.RunStep(self.group.n_steps, self._epoch, shape, segments, changes))
        logits = self._run(own, head)
        self.group.owed = None
        self.group.watch.until(ticket, logits[-1], on_done)
        return logits

    def _known(self, part: Part) -> tuple[np.ndarray, ...]:
        """A part's inputs as far as the host knows them: the newest tokens may be on the device alone, and
        who reads them gets them from there (`ModelSide.fed_in`)."""
        if part.shape.kind != "decode" or part.shape.rank:
            return part.inputs
        tokens, *rest = part.inputs
        return (np.zeros(tokens.shape, np.int32), *rest)

    def _run(self, own: Own, head: Part) -> list[jax.Array]:
        transport, found = self.group.transport, []
        if own.program is not None:
            assert own.weights is not None
            given = head.inputs, head.rows.at, head.rows.local
            call = partial(self._call, own.program)  # once its inputs are on their way
            found.append(transport.unbind(self._side.run(call, own.weights, *given)))
        if own.receive is not None:
            found += transport.unbind(own.receive(self._start))
        return found

    def _call(self, program: Callable[..., Any], *given: Any) -> Any:
        self.on_launch()
        return program(*given)

    def _check_current(self) -> None:
        if self._epoch != self.group.epoch:
            raise UserError(
                "the ranks hold another model's KV since this one was made: one model a group at a time"
            )


def _without_padding(logits: jax.Array, batch: DecodeBatch) -> jax.Array:
    n_rows = len(batch.tokens)
    return logits if len(logits) == n_rows else logits[:n_rows]
