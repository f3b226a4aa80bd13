"""The prefix cache: what it finds, whose slots it keeps, what goes first. Random operations:
test_kv_machine.py."""

from __future__ import annotations

import numpy as np
import pytest

from jaxlamina.kv import PrefixCache, SlotAllocator
from jaxlamina.kv.measure import measure_prefix_us


def make(capacity: int = 64) -> tuple[SlotAllocator, PrefixCache]:
    slots = SlotAllocator(capacity)
    return slots, PrefixCache(slots)


def kept(slots: SlotAllocator, cache: PrefixCache, tokens: str) -> np.ndarray:
    """A finished request: its slots, which only the cache owns now (but for those that it knew already)."""
    own = slots.allocate(len(tokens))
    cache.insert(ids(tokens), own)
    slots.free(own)
    return own


def ids(text: str) -> list[int]:
    return [ord(c) for c in text]


def cached(cache: PrefixCache, tokens: str) -> str:
    return tokens[: cache.match_length(ids(tokens))]


def test_a_prefix_is_found_to_the_token_and_forked():
    slots, cache = make()
    own = kept(slots, cache, "the cat sat")
    found = cache.match(ids("the cow"))
    assert found.dtype == np.int32 and found.tolist() == own[:5].tolist()
    assert slots.owners_of(own).tolist() == [2] * 5 + [1] * 6
    assert (cache.hit_tokens, cache.missed_tokens) == (5, 2)
    slots.check_integrity({"cache": cache.owned_slots(), "caller": found})
    cache.check_integrity()


def test_nothing_known_is_an_empty_match():
    slots, cache = make()
    kept(slots, cache, "abc")
    for tokens in ("", "x", "bc"):
        assert cache.match(ids(tokens)).shape == (0,)
    assert (cache.hit_tokens, cache.missed_tokens) == (0, 3)


def test_match_length_leaves_no_trace():
    slots, cache = make()
    kept(slots, cache, "old one")
    kept(slots, cache, "new one")
    assert cache.match_length(ids("old one!")) == 7 and cache.match_length(ids("o")) == 1
    assert (cache.hit_tokens, cache.missed_tokens, slots.n_used) == (0, 0, 14)
    cache.evict(7)
    assert cached(cache, "old one") == "" and cached(cache, "new one") == "new one"  # looking is no use


def test_branches_share_their_stem():
    slots, cache = make()
    a = kept(slots, cache, "stem and leaf")
    b = kept(slots, cache, "stem and root")  # its first 9 slots are freed again: those tokens are known
    assert cache.n_cached == slots.n_used == 9 + 4 + 4
    assert cache.match(ids("stem and root")).tolist() == [*a[:9], *b[9:]]
    assert cache.match(ids("stem and leaf")).tolist() == a.tolist()
    cache.check_integrity()


def test_insert_says_how_many_tokens_were_new_and_keeps_the_known_ones_slots():
    slots, cache = make()
    a, b = slots.allocate(5), slots.allocate(7)
    assert cache.insert(ids("abcde"), a) == 5
    assert cache.insert(ids("abcdefg"), b) == 2
    assert cache.insert(ids("abcdefg"), b) == 0
    slots.check_integrity({"a": a, "b": b, "cache": [*a, *b[5:]]})


def test_later_changes_of_the_callers_arrays_do_not_reach_the_cache():
    slots, cache = make()
    tokens, own = np.asarray(ids("abc"), np.int32), slots.allocate(3)
    expected = own.tolist()
    cache.insert(tokens, own)
    tokens[:], own[:] = 0, 9
    assert cache.match(ids("abc")).tolist() == expected


def test_least_recently_used_goes_first_from_its_end():
    slots, cache = make()
    for tokens in ("aaaa", "bbbb", "cccc"):
        kept(slots, cache, tokens)
    slots.free(cache.match(ids("aaaa")))
    assert cache.evict(6) == 6
    assert [cached(cache, t) for t in ("aaaa", "bbbb", "cccc")] == ["aaaa", "", "cc"]
    assert cache.evict(100) == 6 and cache.n_cached == slots.n_used == 0
    assert cache.evicted_tokens == 12
    assert cache.evict(1) == 0
    cache.check_integrity()


def test_a_match_keeps_its_own_part_alive_and_not_the_rest():
    slots, cache = make()
    kept(slots, cache, "system prompt: old question")
    kept(slots, cache, "other")
    slots.free(cache.match(ids("system prompt: new")))
    assert cache.evict(12) == 12  # "old question", the oldest
    assert cached(cache, "system prompt: old") == "system prompt: " and cached(cache, "other") == "other"
    cache.evict(5)
    assert cached(cache, "other") == "" and cache.n_cached == len("system prompt: ")


def test_what_a_request_holds_is_not_evicted_until_it_lets_go():
    slots, cache = make()
    own = kept(slots, cache, "prompt and answer")
    running = cache.match(ids("prompt"))
    assert cache.n_evictable == 11
    assert cache.evict(100) == 11 and cache.n_evictable == 0
    assert cache.evict(1) == 0
    assert cached(cache, "prompt and answer") == "prompt"
    slots.free(running)
    assert cache.n_evictable == 6 and cache.evict(4) == 4
    assert cached(cache, "prompt") == "pr" and slots.n_owners(own[0]) == 1


def test_idle_tokens_before_ones_in_use_can_be_evicted_too():
    slots, cache = make()
    kept(slots, cache, "stem")
    other = slots.allocate(6)  # computed by itself, then inserted: the stem's slots are not its own
    assert cache.insert(ids("stem42"), other) == 2
    kept(slots, cache, "another one, in use")
    running = cache.match(ids("another one, in use"))
    assert cache.n_evictable == 4 and cache.evict(3) == 3
    assert cached(cache, "stem42") == "s"
    assert cached(cache, "another one, in use") == "another one, in use"  # nothing idle before it
    slots.check_integrity({"cache": cache.owned_slots(), "other": other, "running": running})
    cache.check_integrity()


def test_of_tails_in_use_the_one_used_least_recently_is_forgotten_first():
    slots, cache = make()
    tails = {}
    for stem in "acb":
        kept(slots, cache, stem)
        if stem != "c":
            tails[stem] = slots.allocate(3)  # computed by itself: the stem's slot is the cache's alone
            cache.insert(ids(stem + "12"), tails[stem])
    assert cache.evict(1) == 1 and cached(cache, "c") == ""  # a, before it, was passed over
    cache.insert(ids("a12"), tails["a"])  # nothing new, but it is used
    assert cache.evict(1) == 1
    assert cached(cache, "a12") == "a12" and cached(cache, "b12") == ""
    assert cache.evict(1) == 1 and cache.n_cached == 0
    slots.check_integrity(tails)


def test_clear_forgets_everything_and_leaves_other_owners_alone():
    slots, cache = make()
    kept(slots, cache, "abcdef")
    running = cache.match(ids("abc"))
    cache.clear()
    assert cache.n_cached == cache.n_evictable == 0 and slots.n_used == 3
    assert cached(cache, "abc") == "" and cache.hit_tokens == 3
    slots.check_integrity({"running": running})
    kept(slots, cache, "abc")
    assert cache.evict(9) == 3
    cache.check_integrity()


def test_a_conversation_stays_one_run_however_many_turns_it_has():
    slots, cache = make(4000)
    for n in range(1, 1200):
        own = slots.allocate(2)
        known = cache.match(np.arange(2 * n - 2))
        cache.insert(np.arange(2 * n), [*known, *own])
        slots.free(known)
        slots.free(own)
    assert cache.match_length(np.arange(5000)) == 2398
    assert len(list(cache._nodes())) == 1
    cache.check_integrity()
    assert cache.evict(5000) == 2398 and slots.n_used == 0


def test_a_very_deep_tree_needs_no_recursion():
    slots, cache = make(2000)
    tokens = np.arange(1500)
    own = slots.allocate(1500)
    cache.insert(tokens, own)
    for n in range(1499, 0, -1):
        cache.match(tokens[:n])  # every match splits off one token
    assert len(list(cache._nodes())) == 1500
    assert np.array_equal(cache.match(tokens), own)
    cache.check_integrity()
    cache.clear()


@pytest.mark.parametrize(
    ("tokens", "at", "message"),
    [
        ("abc", [0, 1], "3 tokens and 2 slots must be equally many"),
        ("xy", [1, 1], "slots .* of new tokens must differ"),
        ("xy", [0, 5], "slot=5 has 0 owner"),
        ("xy", [0, 64], "slot=64 must be within 0 … 63"),
        ("xy", [0, 2], "slot 2 is kept for other tokens already"),
    ],
)
def test_insert_refuses_slots_that_cannot_be_right(tokens: str, at: list[int], message: str):
    slots, cache = make()
    own = slots.allocate(3)
    cache.insert(ids("k"), own[2:])
    with pytest.raises(ValueError, match=message):
        cache.insert(ids(tokens), at)
    assert cache.n_cached == 1
    slots.check_integrity({"own": own, "cache": own[2:]})
    cache.check_integrity()


def leaf_of(cache: PrefixCache):
    return next(node for node in cache._nodes() if not node.children)


@pytest.mark.parametrize(
    ("plant", "message"),
    [
        (lambda s, c: s.free(c.owned_slots()[:1]), "slot 0 is kept by the prefix cache and has no owner"),
        (lambda s, c: c._held.__setitem__(9, True), "slot 9 is kept by the prefix cache but not in its tree"),
        (lambda s, c: setattr(c, "_n_cached", 5), "keeps 6 tokens and counts 5"),
        (lambda s, c: c._queue.clear(), "a leaf that would never be evicted"),
        (lambda s, c: setattr(leaf_of(c), "last_used", 99), "was used after the run before it"),
        (lambda s, c: leaf_of(c).tokens.__setitem__(0, 7), "is not where its first token, 7, is looked up"),
        (lambda s, c: leaf_of(c).slots.__setitem__(0, 0), "has a slot that is kept twice"),
        (lambda s, c: setattr(leaf_of(c), "slots", leaf_of(c).slots[:1]), "of 2 tokens .* has 1 slots"),
    ],
)
def test_check_integrity_names_the_fault(plant, message: str):
    slots, cache = make()
    kept(slots, cache, "abcd")
    kept(slots, cache, "abxy")
    cache.check_integrity()
    plant(slots, cache)
    with pytest.raises(RuntimeError, match=message):
        cache.check_integrity()


def test_a_match_of_a_thousand_tokens_costs_microseconds():
    """A prefill of 1,000 tokens takes milliseconds on the fastest GPU; finding them must not be felt."""
    match_us, insert_us, evict_us = measure_prefix_us(1 << 16, repeats=30)
    assert match_us < 1000 and insert_us < 2000 and evict_us < 1000
