"""Which token prefixes have their KV in slots already: a radix tree over token ids (automatic prefix
caching).

Policy on plain numpy; it knows slot numbers and token ids, no KV array, no device, no request. A slot is one
token, so a prefix is shared to the token and nothing is ever copied: a hit is a ``fork``. The idea of keeping
finished requests' KV in a radix tree with LRU eviction of its leaves is SGLang's RadixAttention (Zheng et al.
2024, §3); token tables are FineInfer's §3.4.

Order: a token's time is when it was last matched or inserted. Of the tokens that no cached token follows, the
one with the oldest time is evicted first, so what is left is always whole prefixes.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Int, Int32

from jaxlamina.kv.allocator import SlotAllocator, Slots, as_slots

Tokens = Sequence[int | np.integer] | np.ndarray


class _Node:
    """An edge of the tree: a run of tokens with a slot each, and what may follow. Only the root's run is
    empty."""

    __slots__ = ("children", "last_used", "parent", "queued", "slots", "tokens")

    def __init__(
        self,
        tokens: Int[np.ndarray, " n"],
        slots: Int[np.ndarray, " n"],
        parent: _Node | None,
        last_used: int,
    ) -> None:
        self.tokens = tokens  # [n] int32
        self.slots = slots  # [n] int32
        self.parent = parent  # None: the root, or no longer in the tree
        self.children: dict[int, _Node] = {}  # by first token
        self.last_used = last_used
        self.queued = False  # has an entry in the queue, or is set aside


class PrefixCache:
    """Slots of token prefixes, kept with one reference each until somebody needs the room.

    ``match`` before a prompt is computed, ``insert`` when its KV is in its slots, ``evict`` when slots run
    short.
    """

    def __init__(self, slots: SlotAllocator) -> None:
        self.slots = slots
        self.hit_tokens = 0  # tokens that `match` found
        self.missed_tokens = 0  # tokens that `match` was asked for and did not find
        self.evicted_tokens = 0
        self._reset()

    def _reset(self) -> None:
        self._clock = 0
        self._held = np.zeros(self.slots.capacity, bool)  # [S] the slots that the cache has a reference on
        self._n_cached = 0
        nothing = np.empty(0, np.int32)
        self._root = _Node(nothing, nothing, None, 0)
        self._queue: list[tuple[int, int, _Node]] = []  # leaves, (last used, tie-break, node), a heap
        self._n_queued = 0
        self._aside: list[_Node] = []  # leaves whose last token has other owners too
        self._n_unshared_seen = self.slots.n_unshared

    @property
    def n_cached(self) -> int:
        """Tokens whose KV the cache keeps, one slot each."""
        return self._n_cached

    @property
    def n_evictable(self) -> int:
        """Slots that nobody but the cache owns: ``evict`` frees as many and no more. O(capacity),
        vectorised."""
        return int(np.count_nonzero((self.slots.owner_counts == 1) & self._held))

    def owned_slots(self) -> Int[np.ndarray, " n"]:
        """The slots that the cache has a reference on, ascending: for ``check_integrity``."""
        return np.flatnonzero(self._held).astype(np.int32)

    def match(self, tokens: Tokens) -> Int32[np.ndarray, " n"]:
        """Slots of the longest cached prefix of ``tokens``. The caller owns one reference each."""
        tokens = as_tokens(tokens)
        path = self._walk(tokens)
        found = np.concatenate([self._root.slots, *(node.slots for node in path)])
        self.slots.fork(found)
        self.hit_tokens += len(found)
        self.missed_tokens += len(tokens) - len(found)
        return found

    def match_length(self, tokens: Tokens) -> int:
        """How many tokens ``match`` would find. Changes nothing: no reference, no time, no counter."""
        tokens, node, n = as_tokens(tokens), self._root, 0
        while n < len(tokens) and (child := node.children.get(int(tokens[n]))) is not None:
            shared = _n_shared(child.tokens, tokens[n:])
            n += shared
            if shared < len(child.tokens):
                break
            node = child
        return n

    def insert(self, tokens: Tokens, slots: Slots) -> int:
        """Keeps the KV of ``tokens``, which lies in ``slots`` (the caller owns them, and goes on owning
        them).

        The cache takes a reference of its own on the slots of the tokens it did not have yet, and returns how
        many these are; tokens that it has, under whatever slots, stay as they are. ``ValueError``, and
        nothing is kept, unless there are as many slots as tokens, all owned, none twice and none kept for
        other tokens.
        """
        tokens, rows = as_tokens(tokens), as_slots(slots)
        if len(tokens) != len(rows):
            raise ValueError(f"{len(tokens)} tokens and {len(rows)} slots must be equally many")
        path = self._walk(tokens)
        n_known = sum(len(node.tokens) for node in path)
        if n_known == len(tokens):
            return 0
        fresh = rows[n_known:].astype(np.int32)  # a copy: the caller's may change
        if len(np.unique(fresh)) < len(fresh):
            raise ValueError(f"slots {fresh.tolist()} of new tokens must differ")
        self.slots.owners_of(fresh)  # within the pool?
        if self._held[fresh].any():
            raise ValueError(f"slot {fresh[self._held[fresh]][0]} is kept for other tokens already")
        self.slots.fork(fresh)
        self._held[fresh] = True
        self._n_cached += len(fresh)
        parent = path[-1] if path else self._root
        if path and not parent.children:  # a conversation's next turn: the run grows, the tree does not
            parent.tokens = np.concatenate([parent.tokens, tokens[n_known:]])
            parent.slots = np.concatenate([parent.slots, fresh])
        else:
            leaf = _Node(tokens[n_known:].copy(), fresh, parent, self._clock)
            parent.children[int(leaf.tokens[0])] = leaf
            self._enqueue(leaf)
        return len(fresh)

    def evict(self, n: int) -> int:
        """Frees up to ``n`` slots that nobody else owns, least recently used leaves first; returns how many.

        Short of ``n``, everything the cache alone owned is free: to get there it also forgets tokens that are
        in use elsewhere, where they follow tokens that are not.
        """
        if self._n_unshared_seen != self.slots.n_unshared:  # what was in use elsewhere may not be any more
            self._n_unshared_seen = self.slots.n_unshared
            aside, self._aside = self._aside, []
            for leaf in aside:
                self._push(leaf)
        freed = self._evict_idle(n)
        while freed < n and self.n_evictable and self._forget_one_shared_tail():
            freed += self._evict_idle(n - freed)
        self.evicted_tokens += freed
        return freed

    def clear(self) -> None:
        """Forgets everything; slots that nobody else owns are free again. Counters stay."""
        self.slots.free(self.owned_slots())
        self._reset()

    def check_integrity(self) -> None:
        """Raises ``RuntimeError`` unless the tree is whole and agrees with the slots' reference counts.

        O(capacity + cached): for tests and idle moments.
        """
        seen = np.zeros_like(self._held)
        aside = {id(leaf) for leaf in self._aside}
        queued = {id(leaf) for _, _, leaf in self._queue}
        for node in self._nodes():
            name = f"the prefix cache's run of {len(node.tokens)} tokens in slots {node.slots[:4].tolist()}…"
            if not 0 < len(node.tokens) == len(node.slots):
                raise RuntimeError(f"{name} has {len(node.slots)} slots")
            parent = node.parent
            if parent is None or parent.children.get(int(node.tokens[0])) is not node:
                raise RuntimeError(f"{name} is not where its first token, {node.tokens[0]}, is looked up")
            if parent is not self._root and parent.last_used < node.last_used:
                raise RuntimeError(f"{name} was used after the run before it")
            if not node.children and not (node.queued and (id(node) in aside or id(node) in queued)):
                raise RuntimeError(f"{name} is a leaf that would never be evicted")
            if seen[node.slots].any() or len(np.unique(node.slots)) < len(node.slots):
                raise RuntimeError(f"{name} has a slot that is kept twice")
            seen[node.slots] = True
        for slot in np.flatnonzero(seen != self._held):
            raise RuntimeError(f"slot {slot} is kept by the prefix cache but not in its tree, or the reverse")
        for slot in np.flatnonzero(seen & (self.slots.owner_counts < 1)):
            raise RuntimeError(f"slot {slot} is kept by the prefix cache and has no owner")
        if (n := int(seen.sum())) != self._n_cached:
            raise RuntimeError(f"the prefix cache keeps {n} tokens and counts {self._n_cached}")

    def _nodes(self) -> Iterator[_Node]:
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _walk(self, tokens: Int[np.ndarray, " n"]) -> list[_Node]:
        """The nodes that spell the longest cached prefix, used now. The last is split if only its head
        matched."""
        self._clock += 1
        path: list[_Node] = []
        node, n = self._root, 0
        while n < len(tokens) and (child := node.children.get(int(tokens[n]))) is not None:
            shared = _n_shared(child.tokens, tokens[n:])
            node = child if shared == len(child.tokens) else self._split(child, shared)
            node.last_used = self._clock
            path.append(node)
            n += shared
            if node is not child:
                break
        return path

    def _split(self, node: _Node, at: int) -> _Node:
        """Cuts a run in two; returns the new node of its head. The tail keeps its time and its place in the
        queue."""
        assert node.parent is not None and 0 < at < len(node.tokens)
        head = _Node(node.tokens[:at], node.slots[:at], node.parent, node.last_used)
        node.parent.children[int(head.tokens[0])] = head
        node.tokens, node.slots, node.parent = node.tokens[at:], node.slots[at:], head
        head.children[int(node.tokens[0])] = node
        return head

    def _enqueue(self, leaf: _Node) -> None:
        if not leaf.queued and leaf is not self._root:
            leaf.queued = True
            self._push(leaf)

    def _push(self, leaf: _Node) -> None:
        self._n_queued += 1
        heapq.heappush(self._queue, (leaf.last_used, self._n_queued, leaf))

    def _evict_idle(self, n: int) -> int:
        """Frees up to ``n`` slots off leaves' ends, as far as nobody else owns them. Other leaves are set
        aside."""
        freed: list[np.ndarray] = []
        missing = n
        while missing > 0 and self._queue:
            time, _, leaf = heapq.heappop(self._queue)
            if leaf.children:  # it has grown; whoever takes its last child puts it back
                leaf.queued = False
                continue
            if leaf.last_used != time:
                self._push(leaf)
                continue
            owners = self.slots.owner_counts[leaf.slots[-missing:]]
            shared = np.flatnonzero(owners != 1)
            n_idle = len(owners) - (int(shared[-1]) + 1 if shared.size else 0)
            if n_idle:
                freed.append(self._cut(leaf, n_idle))
                missing -= n_idle
            if leaf.parent is None:
                continue
            if missing:
                self._aside.append(leaf)
            else:
                self._push(leaf)
        if freed:
            self.slots.free(np.concatenate(freed))
        return n - missing

    def _forget_one_shared_tail(self) -> bool:
        """Lets go of what others own at the end of one leaf, if tokens that nobody else owns come before
        it."""
        counts = self.slots.owner_counts
        for leaf in sorted(self._aside, key=lambda leaf: leaf.last_used):
            node: _Node | None = leaf
            while node is not None and not (counts[node.slots] == 1).any():
                node = node.parent
            if node is None:
                continue
            self._aside.remove(leaf)
            idle = np.flatnonzero(counts[leaf.slots] == 1)
            self.slots.free(self._cut(leaf, len(leaf.slots) - (int(idle[-1]) + 1 if idle.size else 0)))
            if leaf.parent is not None:
                self._push(leaf)
            return True
        return False

    def _cut(self, leaf: _Node, n: int) -> Int[np.ndarray, " {n}"]:
        """Takes the last ``n`` tokens off a leaf; returns their slots, whose references are the caller's to
        free."""
        kept = len(leaf.tokens) - n
        first, slots = int(leaf.tokens[0]), leaf.slots[kept:]
        self._held[slots] = False
        self._n_cached -= n
        leaf.tokens, leaf.slots = leaf.tokens[:kept], leaf.slots[:kept]
        if kept == 0:
            parent = leaf.parent
            assert parent is not None
            del parent.children[first]
            leaf.parent = None
            if not parent.children:
                self._enqueue(parent)
        return slots


def as_tokens(tokens: Tokens) -> Int32[np.ndarray, " n"]:
    """Token ids of any sequence of integers."""
    return np.asarray(tokens, np.int32).reshape(-1)


def _n_shared(a: Int[np.ndarray, " n"], b: Int[np.ndarray, " m"]) -> int:
    """How many tokens two runs have in common from their start."""
    n = min(len(a), len(b))
    differ = a[:n] != b[:n]
    at = int(differ.argmax()) if n else 0
    return at if n and differ[at] else n
