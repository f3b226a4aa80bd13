"""Seconds of each kind of task in a step's plan, from the terms of the devices and of the links.

Products go by rows and weights, attention by the bytes of KV that it reads, messages by what they carry
(`jaxlamina.ranks.wires`). Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxlamina.models.config import ModelConfig
from jaxlamina.planner import roofline
from jaxlamina.planner.terms import QUERIES_A_PASS, LinkTerms, Numbers, Terms, longer
from jaxlamina.planner.walk import BEGIN

if TYPE_CHECKING:
    from jaxlamina.planner.costs import Deployment

_PARTIAL_BYTES = 4  # of an element of a partial: float32
_PRODUCTS = 4  # of a slice: q, k and v; o; gate and up; down


class Matrices(NamedTuple):
    """Parameters of one layer's products, and of the LM head. Products of the same rows are one."""

    qkv: float
    q: float  # of them
    o: float
    up: float
    down: float
    head: float

    @classmethod
    def of(cls, config: ModelConfig) -> Matrices:
        """``UserError`` for a model with operators that have no price here (`roofline.check`)."""
        roofline.check(config)
        d, f, h = config.hidden_size, config.intermediate_size, config.head_dim
        heads, kv_heads = config.num_attention_heads * h, config.num_key_value_heads * h
        n_up = roofline.n_mlp_matrices(config) - 1
        head = config.vocab_size * (config.embed_dim or d)
        return cls(d * (heads + 2 * kv_heads), d * heads, heads * d, n_up * d * f, d * f, head)


def slice_weights(config: ModelConfig) -> list[float]:
    """Parameters that each slice reads, as a pipeline's stages are balanced by: the first one has the
    embedding, too."""
    m, n = Matrices.of(config), config.num_hidden_layers
    ended = m.o + m.up + m.down
    return [m.head + m.qkv, *[ended + m.qkv] * (n - 1), ended + m.head]


class Sides(NamedTuple):
    """What differs between setups that are alike (`Deployment.kind`): of one, or arrays of several. Links'
    numbers are arrays then, too."""

    n_attention: Numbers
    local_share: Numbers
    local_heads: Numbers
    n_links: tuple[Numbers, Numbers]
    link: LinkTerms | None
    between: LinkTerms | None

    @classmethod
    def of(cls, setup: Deployment) -> Sides:
        local_heads = setup.layout.local_heads(setup.config.num_key_value_heads)
        n_links = setup.n_links if setup.is_split else (0, 0)
        return cls(
            setup.n_attention, setup.local_share, local_heads, n_links, setup.link, setup.link_between_models
        )

    @classmethod
    def of_all(cls, setups: Sequence[Deployment]) -> Sides:
        """``setups``: alike."""
        n, share, heads, n_links, links, between = zip(*(one.sides for one in setups), strict=True)
        counted: Any = np.array(n_links, float)
        return cls(
            np.array(n, float), np.array(share), np.array(heads, float), (counted[:, 0], counted[:, 1]),
            _all_links(links), _all_links(between),
        )  # fmt: skip


def _all_links(links: Sequence[LinkTerms | None]) -> LinkTerms | None:
    if (first := links[0]) is None:
        return None
    numbers: Any = np.array([link[:2] for link in links if link is not None])
    return first._replace(fixed_s=numbers[:, 0], bytes_s=numbers[:, 1])


@dataclass(frozen=True)
class TaskTimes:
    """Of one step: ``n_rows`` requests in all with ``context`` stored tokens each on average, and alongside
    ``chunk_tokens`` of a prompt of which ``chunk_stored`` tokens are stored.

    Or of several steps at once, of setups that are alike: then ``n_rows`` and ``context`` are arrays, and
    ``setup`` is one of the setups, ``several`` what differs between them."""

    setup: Deployment
    n_rows: Numbers
    context: Numbers
    chunk_tokens: int = 0
    chunk_stored: int = 0
    several: Sides | None = None

    @property
    def works(self) -> dict[str, Numbers]:
        """By key of `jaxlamina.planner.walk`."""
        m, rows, logits = self._matrices, self.rows_run, self._logits_rows
        put_together_s = self._combine_s
        ended = (m.o, m.up, m.down)
        qkv_s, q_s, kv_s = (self.products_s((n,), rows) for n in (m.qkv, m.q, m.qkv - m.q))
        after = put_together_s + self.products_s(ended, rows) + 2 * self.sum_s(rows)
        looked_up_s = self.sum_s(rows) if self.setup.is_split else 0.0  # unsplit, each has all embeddings
        return {
            BEGIN: self.setup.compute.step_fixed_s
            + self.n_rows / self.setup.n_replicas * self.setup.compute.row_fixed_s
            + self._plans_s(self.setup.compute, local=True),
            "begin pool": 0.0 if self._memory is None else self._plans_s(self._memory, local=False),
            "first whole": looked_up_s + qkv_s,
            "first q": looked_up_s + q_s,
            "first kv": kv_s,
            "slice whole": after + qkv_s,
            "slice q": after + q_s,
            "slice kv": kv_s,
            "last": put_together_s
            + self.products_s((*ended, m.head), logits)
            + 2 * self.sum_s(logits)
            + self._logits_columns_s,
            "attend": 0.0 if self._memory is None else self._attend_s(self._memory, *self._remote),
            "attend here": self._attend_s(self.setup.compute, *self._local)
            + self.pairs_s(self.chunk_tokens * self.chunk_tokens / 2),  # a chunk's tokens among themselves
        }

    @property
    def messages(self) -> Mapping[str, tuple[Numbers, Numbers]]:
        """(bytes, of how many workers) by key of `jaxlamina.planner.walk`, between all shards of a replica
        and all workers; from model rank to model rank for those whose key says so."""
        setup, config, sides = self.setup, self.setup.config, self.sides
        e, h, n = setup.weight_bytes, config.head_dim, longer(1, sides.n_attention)
        group, layout = roofline.group_size(config), setup.layout
        if layout.by_heads:
            kv_heads = config.num_key_value_heads - sides.local_heads
            q_rows, new, heads = self.rows_each, self.rows_each, kv_heads * group  # of all workers together
        else:
            kv_heads, heads = config.num_key_value_heads, config.num_attention_heads
            share = 1 - sides.local_share
            q_rows = self.rows_each * (n if setup.partition == "tokens" else share)
            new = share * self.rows_each
        chunk, keepers = self.chunk_tokens, 1 if layout.by_heads or not self.chunk_tokens else n
        q = (q_rows + chunk * keepers) * heads * h * e
        kv = 2 * (new + chunk) * kv_heads * h * e
        partial = (h + 1) * heads * _PARTIAL_BYTES
        out = q_rows * (heads * h * e if layout.by_heads else partial) + chunk * keepers * partial
        n_parts = setup.mini_batches
        q, kv, out = q / n_parts, kv / n_parts, out / n_parts
        residual = self.rows_each * config.hidden_size * e
        qkv_all = self.rows_each * (config.num_attention_heads + 2 * config.num_key_value_heads) * h * e
        return {
            "q": (q, n),
            "kv": (kv, n),
            "qkv": (q + kv, n),
            "out": (out, n),
            "logits": (4 * self.rows_each * config.vocab_size, 1),
            "hand over nothing": (residual, 1),
            "hand over qkv": (residual + qkv_all, 1),
            "hand over out": (residual + self.rows_each * config.num_attention_heads * h * e, 1),
        }

    def ends(self) -> tuple[dict[str, Numbers], dict[str, tuple[Numbers, Numbers]]]:
        """(seconds of messages for which both ends meet, what putting and taking others takes)."""
        link, between = self.sides.link, self.sides.between
        meets: dict[str, Numbers] = {}
        ends: dict[str, tuple[Numbers, Numbers]] = {}
        if link is None or between is None:
            return meets, ends
        messages = self.messages
        for key, (n_bytes, n) in messages.items():
            if key.startswith(("logits", "hand over")):
                meets[key] = between.message_s(n_bytes)
                ends[key] = between.message_s(n_bytes) - between.fixed_s / 2, between.fixed_s / 2
                continue
            # Each shard has a link, and so has each worker: the side with fewer of them is the slower one.
            # Who puts stores its part once for each that it talks to.
            bytes_s = link.bytes_s * self._n_sides(n)
            meets[key] = link.fixed_s + n_bytes / bytes_s
            of_shard_s, of_worker_s = (n_ends * link.fixed_s / 2 for n_ends in self.sides.n_links)
            putter_s, taker_s = (of_worker_s, of_shard_s) if key == "out" else (of_shard_s, of_worker_s)
            ends[key] = putter_s + (0.0 if link.by_nic else n_bytes / bytes_s), taker_s
            if key in ("q", "kv", "qkv"):
                both = "/".join(sorted((key, "out")))
                meets[both] = longer(meets[key], link.fixed_s + messages["out"][0] / bytes_s)
        return meets, ends

    @property
    def on_wire(self) -> dict[str, Numbers]:
        """Seconds of messages that network cards carry while their sender goes on."""
        link, messages = self.sides.link, self.messages
        if link is None or not link.by_nic:
            return {}
        carried = {key: messages[key] for key in ("q", "kv", "qkv", "out")}
        return {key: n_bytes / (link.bytes_s * self._n_sides(n)) for key, (n_bytes, n) in carried.items()}

    def _n_sides(self, n_workers: Numbers) -> Numbers:
        """The fewer of workers and a replica's shards."""
        shards = self.setup.tensor_parallel
        return np.minimum(n_workers, shards) if isinstance(n_workers, np.ndarray) else min(n_workers, shards)

    def products_s(self, matrices: tuple[float, ...], n_rows: Numbers) -> Numbers:
        """One after the other, with the small kernels between them; shared out over a replica's shards."""
        setup, terms = self.setup, self.setup.compute
        found: Numbers = len(matrices) * terms.slice_fixed_s / _PRODUCTS
        for n_weights in matrices:
            found = found + terms.product_s(n_weights / setup.tensor_parallel, n_rows, setup.weight_bytes)
        return found

    def sum_s(self, n_rows: Numbers) -> Numbers:
        """Of parts that a replica's shards have of ``n_rows`` rows as wide as the model; 0 of one shard.

        Ranks of a split model (`jaxlamina.ranks.shards`) swap whole parts, pair by pair in one order: shards
        i and j in round i + j, so that the last pair of n shards is in round 2n - 3. Unsplit, XLA sums: each
        device sends and receives 2 (n - 1) / n of a part."""
        setup, n, between = self.setup, self.setup.tensor_parallel, self.sides.between
        if n == 1 or between is None:
            return 0.0
        n_bytes = n_rows * setup.config.hidden_size * setup.weight_bytes
        if setup.is_split:
            return (2 * n - 3) * between.message_s(n_bytes)
        return between.message_s(2 * (n - 1) / n * n_bytes)

    @property
    def moved_s(self) -> Numbers:
        """What is run together, from stage to stage of a pipeline."""
        n_moves, between = self.setup.pipeline_parallel - 1, self.sides.between
        if not n_moves or between is None:
            return 0.0
        return n_moves * between.message_s(
            self.rows_run * self.setup.config.hidden_size * self.setup.weight_bytes
        )

    @property
    def _logits_columns_s(self) -> Numbers:
        """Of other shards, to the first one."""
        setup, n, between = self.setup, self.setup.tensor_parallel, self.sides.between
        if n == 1 or between is None:
            return 0.0
        columns = setup.config.vocab_size * (n - 1) / n
        return between.message_s(self._logits_rows * columns * setup.weight_bytes)

    @property
    def sides(self) -> Sides:
        return self.several or self.setup.sides

    @cached_property
    def _matrices(self) -> Matrices:
        return Matrices.of(self.setup.config)

    @property
    def _memory(self) -> Terms | None:
        return self.setup.memory

    @property
    def rows_each(self) -> Numbers:
        """Of one batch, on one replica where there is no pool to share."""
        n = self.setup.n_batches if self.setup.has_pool else self.setup.n_replicas
        return self.n_rows / n

    @property
    def rows_run(self) -> Numbers:
        """That go through a slice together."""
        return self.rows_each + self.chunk_tokens

    @property
    def _logits_rows(self) -> Numbers:
        setup = self.setup
        together = setup.has_pool and setup.n_replicas == 1 and setup.pipeline_parallel == 1
        return (self.n_rows if together else self.rows_each) + (self.chunk_tokens > 0)

    # --- attention: (KV heads of one device, tokens of rows, tokens of the chunk) that it reads ---
    @property
    def _remote(self) -> tuple[Numbers, Numbers, Numbers]:
        setup, k = self.setup, self.setup.config.num_key_value_heads
        n, layout, sides = self.sides.n_attention, setup.layout, self.sides
        rows = self.rows_each / setup.mini_batches  # that are attended to at once
        tokens = rows * self.context, self.chunk_stored * self._chunk_passes
        if layout.by_heads:
            return (-(-(k - sides.local_heads) // n), *tokens)  # of the worker with most of them
        share = (1 - sides.local_share) / n
        return k, share * tokens[0], share * tokens[1]

    @property
    def _local(self) -> tuple[Numbers, Numbers, Numbers]:
        setup, k = self.setup, self.setup.config.num_key_value_heads
        tokens = self.rows_each * self.context, self.chunk_stored * self._chunk_passes
        layout, share = setup.layout, self.sides.local_share if setup.has_pool else 1.0
        if not layout.attends_locally:
            return k, 0.0, 0.0
        if layout.by_heads:
            return (self.sides.local_heads / setup.tensor_parallel, *tokens)
        return k / setup.tensor_parallel, share * tokens[0], share * tokens[1]

    @property
    def _chunk_passes(self) -> int:
        queries = self.chunk_tokens * roofline.group_size(self.setup.config)
        return -(-queries // QUERIES_A_PASS)

    def _plans_s(self, terms: Terms, *, local: bool) -> float:
        if local and not self.setup.layout.attends_locally:
            return 0.0
        n = self.setup.n_batches * self.setup.mini_batches if self.setup.has_pool else 1
        return n * terms.attention_step_s

    def _attend_s(self, terms: Terms, kv_heads: Numbers, n_tokens: Numbers, chunk_tokens: Numbers) -> Numbers:
        """Of one layer: rows, and then the chunk's queries if there are any."""
        row_bytes = kv_heads * self.setup.config.head_dim * self.setup.kv_bytes
        has_rows = isinstance(self.n_rows, np.ndarray) or self.n_rows
        found = terms.attention_s(n_tokens, row_bytes) if has_rows else 0.0
        if self.chunk_tokens and chunk_tokens:
            found = found + terms.attention_s(chunk_tokens, row_bytes)
        return found

    def pairs_s(self, n_pairs: float) -> float:
        """Of so many queries with a key each, in one layer: 4 FLOP for each element of each head."""
        config, setup = self.setup.config, self.setup
        flop = 4 * n_pairs * config.num_attention_heads * config.head_dim
        return flop / (setup.tensor_parallel * setup.compute.product_flop_s)

    @property
    def _combine_s(self) -> Numbers:
        """Partials of the same rows are put together on the model rank, unless each has heads of its own."""
        setup = self.setup
        if not setup.has_pool or setup.layout.by_heads:
            return 0.0
        n_partials = self.sides.n_attention + setup.layout.attends_locally + 1
        width = setup.config.num_attention_heads * (setup.config.head_dim + 1)
        n_bytes = _PARTIAL_BYTES * n_partials * self.rows_each * width
        return setup.compute.combine_fixed_s + n_bytes / setup.compute.product_bytes_s
