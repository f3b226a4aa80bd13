"""What a journal has not written yet, against what it has: a real SQLite file in memory, without its thread."""

from __future__ import annotations

import sqlite3
from array import array
from collections import Counter
from contextlib import closing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxlamina.supervisor import journal as journal_module
from jaxlamina.supervisor import unwritten as unwritten_module
from jaxlamina.supervisor.unwritten import UnwrittenRequests

ON_THE_WAY = st.lists(
    st.tuples(
        st.sampled_from(
            ["begin", "wrote", "wrote", "cut", "cached", "ended", "forget", "try", "written", "not written"]
        ),
        st.integers(0, 1),
    ),
    min_size=20,
    max_size=60,
)


@given(ON_THE_WAY, st.sampled_from([unwritten_module.MOST_BYTES, 3000]))
@settings(deadline=None, max_examples=200)
def test_what_is_not_written_yet_and_the_disk_are_all_there_is(ops, most_bytes):
    """Whatever comes while some is tried. With little room the disk has less of a request, and no gap in it."""
    with closing(sqlite3.connect(":memory:")) as database, pytest.MonkeyPatch.context() as patch:
        patch.setattr(unwritten_module, "MOST_BYTES", most_bytes)
        database.executescript(journal_module._TABLES)
        unwritten, tried, known, n_forgotten = UnwrittenRequests(), {}, {}, Counter()
        was_cut = set()

        def write(taken):
            for key, what in taken.items():
                journal_module._write_request(database, key, what)
            unwritten.fails = False

        for n, (op, i) in enumerate(ops):
            key = f"k{i}, {n_forgotten[i]}"  # none comes again
            n_bytes = unwritten.n_bytes
            if op == "begin" and key not in known:
                known[key] = [[], [], False]
                unwritten.begin((key, "/", bytes(900), 0, 0))
            elif op == "wrote" and key in known and not known[key][2]:
                for token in range(100 * n, 100 * n + 100):
                    known[key][0].append(token)
                    unwritten.wrote(key, (0, 0), token)
            elif op == "cut" and key in known and not known[key][2]:
                was_cut.add(key)
                del known[key][0][-150:]
                unwritten.cut(key, (0, 0), known[key][0])
            elif op == "cached" and key in known and not known[key][2]:
                known[key][1].append(n)
                unwritten.cached(key, 0, n)
            elif op == "ended" and key in known:
                known[key][2] = True
                unwritten.ended(key, 5.0)
            elif op == "forget" and known.pop(key, None):
                unwritten.forget(key)
                n_forgotten[i] += 1
            elif op == "try" and not tried:
                tried = unwritten.take(i or None)
            elif op == "written":
                write(tried)
                tried = {}
            elif op == "not written" and tried:
                unwritten.fails = True
                unwritten.put_back(tried)
                tried = {}
            if not tried:
                on_disk = {key for (key,) in database.execute("SELECT key FROM requests")}
                assert all(key in known or key in on_disk for key in unwritten._of), "it is forgotten"
            if unwritten.fails and op in ("begin", "wrote", "cached"):
                assert unwritten.n_bytes <= max(n_bytes, most_bytes)
        write(tried)
        write(unwritten.take())
        assert not unwritten and unwritten.n_bytes == 0
        found = dict(database.execute("SELECT key, ended IS NOT NULL FROM requests"))
        is_whole = most_bytes > 3000
        assert set(found) == set(known) if is_whole else set(found) <= set(known)
        for key, has_ended in found.items():
            rows = database.execute("SELECT ids FROM tokens WHERE key = ? ORDER BY rowid", (key,))
            tokens = [token for (ids,) in rows for token in array("i", ids)]
            cached = [n for (n,) in database.execute("SELECT n FROM cached WHERE key = ?", (key,))]
            wrote, of_cached, ended = known[key]
            # Without room it may have what was before a cut.
            assert tokens == wrote[: len(tokens)] or (key in was_cut and not is_whole)
            assert cached == of_cached[: len(cached)]
            assert bool(has_ended) == ended
            assert not is_whole or (tokens, cached) == (wrote, of_cached)
        for table in ("tokens", "cached"):
            assert {key for (key,) in database.execute(f"SELECT key FROM {table}")} <= set(found)
