"""A request goes on in another process after the tokens that it has: engine, journal, and what a server says to
a supervisor."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import resource
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from contextlib import closing, suppress
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from checkpoint_examples import byte_model, tiny_words_folder
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import ROOT, WORDS_TEMPLATE, environment, serving
from supervised import wait_until

from jaxlamina import LLM, SamplingParams, UserError
from jaxlamina.sampling.params import StructuredOutputs
from jaxlamina.server.async_engine import AsyncEngine, Prompt, TooMany
from jaxlamina.server.metrics import Metrics
from jaxlamina.server.pieces import SECRET, Opening, Piece
from jaxlamina.supervisor import journal as journal_module
from jaxlamina.supervisor.journal import Entry, Journal

PROMPT = [5, 9, 11, 3, 4, 17, 8, 2, 1, 6]
KINDS = {
    "greedy": SamplingParams(max_tokens=24, temperature=0, ignore_eos=True),
    "seeded": SamplingParams(max_tokens=24, seed=7, ignore_eos=True),
    "penalties": SamplingParams(max_tokens=24, seed=7, presence_penalty=0.5, repetition_penalty=1.3, ignore_eos=True),
    "stop string": SamplingParams(max_tokens=24, seed=3, stop=["w40", "w41", "w42"]),
    "least": SamplingParams(max_tokens=24, seed=9, min_tokens=8),
}  # fmt: skip


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_words_folder(tmp_path_factory.mktemp("tiny"), max_position_embeddings=2048)


@pytest.fixture(scope="module")
def llm(tiny):
    return LLM(tiny, max_num_seqs=4, max_model_len=128)


def run(engine, params, written=(), n_given=0):
    """Events of one request, beside another that runs already. ``written``: of its only continuation."""
    return run_all(engine, params, {0: written} if written else {}, {0: n_given})


def run_all(engine, params, written, n_given):
    """The same, ``written`` by each continuation."""
    engine.add_request([1, 2, 3], SamplingParams(max_tokens=6, ignore_eos=True, seed=1))
    engine.step()
    job = engine.admission.job(PROMPT, params, None)
    engine.add_job(job, written=written, n_given=n_given)
    events = []
    while not engine.idle:
        events += [event for event in engine.step() if event.request_id == job.request_id]
    engine.check_integrity()
    return events


@pytest.mark.parametrize("kv_dtype", ["int8", "int8-channel", "auto"])
def test_a_request_that_begins_anew_is_computed_as_it_was(tiny, kv_dtype):
    """KV of int8 is rounded, and a prompt's own tokens attend to each other's before it is."""
    llm = LLM(tiny, max_num_seqs=4, max_model_len=128, kv_dtype=kv_dtype)
    engine, stats = llm.engine, llm.engine.stats
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, logprobs=1)
    prompt = [(7 * i + i * i) % 60 + 2 for i in range(60)]

    def logprobs(n_cached=None):
        n_found = stats.n_prefix_hit_tokens
        job = engine.admission.job(prompt, params, None)
        engine.add_job(job, n_cached=n_cached)
        events = []
        while not engine.idle:
            events += engine.step()
        engine.check_integrity()
        said = np.array([next(iter(event.logprobs.values())).logprob for event in events])
        return said, stats.n_prefix_hit_tokens - n_found

    first, n_found = logprobs()
    assert n_found == 0
    found, n_found = logprobs()
    assert n_found == len(prompt) - 1
    rounds = kv_dtype != "auto"
    assert (np.abs(found - first).max() > 1e-3) == rounds
    for n, as_then in ((0, first), (32, None), (59, found)):
        again, n_found = logprobs(n_cached=n)
        assert n_found == (n if rounds else len(prompt) - 1)
        if as_then is not None:
            np.testing.assert_allclose(again, as_then, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 7, 23, 10**6])
def test_a_request_goes_on_after_what_it_wrote(llm, kind, n):
    whole = run(llm.engine, KINDS[kind])
    tokens = [event.token_id for event in whole]
    again = run(llm.engine, KINDS[kind], tokens[:n])
    assert [event.is_again for event in again] == [i < n for i in range(len(tokens))]
    assert [(e.token_id, e.new_text) for e in again] == [(e.token_id, e.new_text) for e in whole]
    check_same_end(whole, again)


def check_same_end(whole, again):
    first, last = whole[-1].output, again[-1].output
    assert (first.text, first.finish_reason, first.stop_reason) == (
        last.text,
        last.finish_reason,
        last.stop_reason,
    )
    assert not any(event.output for event in again[:-1])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "n_given"), [(7, 7), (7, 1), (23, 20), (10**6, 10**6)])
def test_what_a_caller_has_had_is_one_event(llm, kind, n, n_given):
    whole = run(llm.engine, KINDS[kind])
    tokens = [event.token_id for event in whole]
    n, n_given = min(n, len(tokens)), min(n_given, len(tokens))
    bundle, *again = run(llm.engine, KINDS[kind], tokens[:n], n_given)
    assert bundle.is_again and bundle.n_tokens == n_given and bundle.token_id == tokens[n_given - 1]
    assert bundle.new_text == "".join(event.new_text for event in whole[:n_given])
    assert [e.is_again for e in again] == [i < n for i in range(n_given, len(tokens))]
    assert [(e.token_id, e.new_text) for e in again] == [(e.token_id, e.new_text) for e in whole[n_given:]]
    check_same_end(whole, [bundle, *again])


def test_a_grammar_goes_on_where_it_was():
    pytest.importorskip("llguidance")
    llm = LLM(byte_model(), split=False, max_num_seqs=2, max_model_len=64)
    asked = StructuredOutputs(regex="[A-Z][a-z]{3,8} [0-9]{4}, [a-z ]{5,10}!")
    params = SamplingParams(max_tokens=40, seed=2, structured_outputs=asked)
    whole = run(llm.engine, params)
    tokens = [event.token_id for event in whole]
    assert re.fullmatch(asked.regex, whole[-1].output.text)
    for n in (1, len(tokens) // 2, len(tokens) - 1):
        assert [event.token_id for event in run(llm.engine, params, tokens[:n])] == tokens


@pytest.mark.parametrize("kind", ["seeded", "penalties", "stop string", "least"])
@pytest.mark.parametrize("n", [(7, 7, 7), (8, 0, 7), (0, 23, 1), (10**6, 5, 10**6), (10**6,) * 3])
@pytest.mark.parametrize("gives_one_less", [False, True])
def test_each_continuation_goes_on_after_what_it_wrote(llm, kind, n, gives_one_less):
    """They need not have come equally far, and one may have no token, or have ended."""
    params = replace(KINDS[kind], n=3)
    stats = llm.engine.stats
    before = stats.n_prompt_tokens
    whole = of_each(run_all(llm.engine, params, {}, {}))
    n_prompt_tokens = stats.n_prompt_tokens - before
    assert n_prompt_tokens == len(PROMPT) + 3
    tokens = {index: [event.token_id for event in events] for index, events in whole.items()}
    written = {index: tokens[index][:m] for index, m in enumerate(n) if m}
    n_given = {index: max(0, len(ids) - gives_one_less) for index, ids in written.items()}
    all_again = run_all(llm.engine, params, written, n_given)
    has_ended = all(len(written.get(index, ())) == len(ids) for index, ids in tokens.items())
    assert stats.n_prompt_tokens - before - n_prompt_tokens == 3 + (0 if has_ended else len(PROMPT))
    again = of_each(all_again)
    assert again.keys() == whole.keys()
    for index, events in again.items():
        n_old, n_told = len(written.get(index, ())), n_given.get(index, 0)
        ats = np.cumsum([event.n_tokens for event in events]) - 1
        assert list(ats) == list(range(max(0, n_told - 1), len(tokens[index])))
        assert [event.is_again for event in events] == [at < n_old for at in ats]
        assert [event.token_id for event in events] == [tokens[index][at] for at in ats]
        assert "".join(e.new_text for e in events) == "".join(e.new_text for e in whole[index])
        found = [
            (at, event.n_found) for at, event in zip(ats, events, strict=True) if event.n_found is not None
        ]
        assert [at for at, _ in found] == ([n_old] if n_old < len(tokens[index]) else [])
    last, of_whole = (
        all_again[-1].output,
        max(whole.values(), key=lambda e: e[-1].output is not None)[-1].output,
    )
    assert [(o.text, o.token_ids, o.finish_reason) for o in last.outputs] == [
        (o.text, o.token_ids, o.finish_reason) for o in of_whole.outputs
    ]
    assert sum(event.output is not None for event in all_again) == 1


def test_a_continuation_that_is_not_told_in_whole_has_the_outputs_event(llm):
    """Else a server would pass over it, and with it how all continuations ended."""
    params = replace(KINDS["seeded"], n=2)
    tokens = {
        i: [e.token_id for e in events] for i, events in of_each(run_all(llm.engine, params, {}, {})).items()
    }
    n_given = {0: len(tokens[0]) - 1, 1: len(tokens[1])}
    *events, last = run_all(llm.engine, params, tokens, n_given)
    assert last.output is not None and (last.index, last.n_tokens) == (0, 1)
    assert not any(event.output for event in events)


def test_what_goes_on_is_ranked_by_what_it_has_left(tiny):
    llm = LLM(tiny, max_num_seqs=1, max_model_len=128, scheduling_policy="shortest-remaining")
    engine, params = llm.engine, SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    tokens = [event.token_id for event in run(engine, params)]
    longer = engine.add_request([1, 2], replace(params, max_tokens=10))
    going_on = engine.admission.job(PROMPT, params, None)
    engine.add_job(going_on, written={0: tokens[:22]})
    ended = []
    while not engine.idle:
        ended += [event.request_id for event in engine.step() if event.output]
    assert ended == [going_on.request_id, longer]


def test_who_wrote_nothing_yet_does_not_go_on(llm):
    """Its prompt is computed once for all continuations."""
    params, stats = replace(KINDS["seeded"], n=3), llm.engine.stats
    before = stats.n_prompt_tokens_computed
    run_all(llm.engine, params, {}, {})
    once = stats.n_prompt_tokens_computed - before
    run_all(llm.engine, params, {0: (), 2: ()}, {})
    assert stats.n_prompt_tokens_computed - before == 2 * once


def of_each(events):
    found = {}
    for event in events:
        found.setdefault(event.index, []).append(event)
    return found


def test_what_has_entries_or_chooses_at_its_end_begins_anew(llm):
    chosen = (
        SamplingParams(n=1, best_of=2, max_tokens=4),
        SamplingParams(n=2, use_beam_search=True, temperature=0, max_tokens=4),
    )
    for params in (*chosen, SamplingParams(logprobs=1, max_tokens=4)):
        job = llm.engine.admission.job(PROMPT, params, None)
        with pytest.raises(UserError, match="begin it anew"):
            llm.engine.add_job(job, written={0: [1]})
    for token in (-1, 64):
        job = llm.engine.admission.job(PROMPT, KINDS["greedy"], None)
        with pytest.raises(UserError, match="not in the vocabulary"):
            llm.engine.add_job(job, written={0: [1, token]})
    assert llm.engine.idle


def test_an_aborted_request_that_went_on_leaves_nothing(llm):
    job = llm.engine.admission.job(PROMPT, KINDS["greedy"], None)
    llm.engine.add_job(job, written={0: [1, 2, 3]})
    assert not llm.engine.idle
    output = llm.engine.abort(job.request_id)
    assert output.token_ids == (1, 2, 3) and output.finish_reason == "abort"
    llm.engine.step()
    assert llm.engine.idle
    llm.engine.check_integrity()


# --- the journal ---

OPS = st.lists(
    st.one_of(
        st.tuples(st.just("accept"), st.integers(0, 5)),
        st.tuples(
            st.just("wrote"),
            st.integers(0, 5),
            st.tuples(st.integers(0, 2), st.integers(0, 2)),
            st.integers(0, 2**31 - 1),
        ),
        st.tuples(
            st.just("cut"),
            st.integers(0, 5),
            st.tuples(st.integers(0, 2), st.integers(0, 2)),
            st.integers(0, 9),
        ),
        st.tuples(st.just("ended"), st.integers(0, 5)),
        st.tuples(st.just("forget"), st.integers(0, 5)),
        st.tuples(st.just("reopen")),
    ),
    max_size=30,
)


@given(OPS)
@settings(max_examples=40, deadline=None)
def test_the_journal_has_what_was_written(tmp_path_factory, ops):
    path = tmp_path_factory.mktemp("journal") / "journal.sqlite"
    known: dict[str, Entry] = {}
    journal = Journal(path)
    for op, *about in [*ops, ("reopen",)]:
        key = f"k{about[0]}" if about else ""
        if op == "accept" and key not in known:
            known[key] = Entry(key, "/v1/completions", b"{}\n\xff", 17, 2**62 - 1)
            asyncio.run(journal.accept(known[key]))
        elif op == "wrote" and key in known and not known[key].has_ended:
            _, of, token = about
            known[key].wrote.setdefault(of, []).append(token)
            journal.wrote(key, of, token)
        elif op == "cut" and key in known and not known[key].has_ended:
            _, of, at = about
            if wrote := known[key].wrote.pop(of, [])[:at]:
                known[key].wrote[of] = wrote
            journal.cut(key, of, wrote)
        elif op == "ended" and key in known:
            known[key] = Entry(*_fields(known[key]), has_ended=True)
            journal.ended(key)
        elif op == "forget" and known.pop(key, None):
            journal.forget(key)
        elif op == "reopen":
            journal.close()
            journal = Journal(path)
            assert {entry.key: entry for entry in journal.entries()} == known
    journal.close()


def _fields(entry):
    return entry.key, entry.path, entry.body, entry.created, entry.seed, entry.wrote


def test_what_ended_long_ago_is_forgotten(tmp_path):
    path = tmp_path / "journal.sqlite"
    journal = Journal(path)
    for key in ("a", "b"):
        asyncio.run(journal.accept(Entry(key, "/", b"", 0, 0)))
        journal.wrote(key, (0, 0), 1)
        journal.ended(key)
    journal.close()
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("UPDATE requests SET ended = 5 WHERE key = 'a'")
    journal = Journal(path)
    assert [entry.key for entry in journal.entries()] == ["b"]
    journal.close()
    with closing(sqlite3.connect(path)) as database:
        assert database.execute("SELECT DISTINCT key FROM tokens").fetchall() == [("b",)]


def test_a_journal_of_an_earlier_version_goes_on(tmp_path):
    """It knew first continuations alone."""
    path = tmp_path / "journal.sqlite"
    Journal(path).close()
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("DROP TABLE tokens")
        database.execute("CREATE TABLE tokens (key TEXT NOT NULL, which INTEGER NOT NULL, ids BLOB NOT NULL)")
        database.execute("INSERT INTO requests VALUES ('a', '/', x'', 0, 0, NULL)")
        database.execute("INSERT INTO tokens VALUES ('a', 1, ?)", (np.array([5, 6], np.int32).tobytes(),))
    for n in range(2):
        journal = Journal(path)
        known = {(1, 0): [5, 6] + [7] * n} | ({(1, 1): [8]} if n else {})
        assert [entry.wrote for entry in journal.entries()] == [known]
        if not n:
            journal.wrote("a", (1, 0), 7)
            journal.wrote("a", (1, 1), 8)
        journal.close()


def test_a_journal_is_one_supervisors(tmp_path):
    path = tmp_path / "journal.sqlite"
    journal = Journal(path)
    code = "import sys, pathlib, jaxlamina.supervisor.journal as j; j.Journal(pathlib.Path(sys.argv[1]))"
    words = [sys.executable, "-c", code, str(path)]
    done = subprocess.run(words, check=False, capture_output=True, text=True, timeout=60)
    journal.close()
    assert done.returncode and "end the supervisor that has it" in done.stderr
    (tmp_path / "none").write_text("this is no database, however long it may be" * 100)
    with pytest.raises(UserError, match="cannot be used: file is not a database"):
        Journal(tmp_path / "none")


def test_a_full_disk_loses_nothing_of_a_journal(tmp_path):
    """The disk is full as long as files may not grow."""
    path = tmp_path / "journal.sqlite"
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    journal = Journal(path)
    try:
        asyncio.run(journal.accept(Entry("a", "/", b"", 0, 0)))
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size, hard))
        try:
            began = time.monotonic()
            journal.wrote("a", (0, 0), 7)
            asyncio.run(journal.accept(Entry("b", "/", bytes(10**6), 0, 0)))
            assert journal.n_failures and time.monotonic() - began < 20
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        journal.wrote("b", (0, 0), 8)
    finally:
        journal.close()
        signal.signal(signal.SIGXFSZ, before)
    journal = Journal(path)
    assert {entry.key: entry.wrote for entry in journal.entries()} == {
        "a": {(0, 0): [7]},
        "b": {(0, 0): [8]},
    }
    journal.close()


def test_a_full_disk_costs_nobody_time_or_memory(tmp_path, monkeypatch):
    """What is forgotten meanwhile takes no memory, and when there is room again the rest is written."""
    monkeypatch.setattr(journal_module, "_ACCEPT_S", 600)
    path = tmp_path / "journal.sqlite"
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    journal = Journal(path)

    async def accept(*keys):
        async with asyncio.timeout(60):
            for key in keys:
                await journal.accept(Entry(key, "/", bytes(10**6), 0, 0))

    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size, hard))
        asyncio.run(accept("a", "b", "c", "d"))
        held = journal._unwritten.n_bytes
        for key in "abc":
            journal.wrote(key, (0, 0), 7)
            journal.ended(key)
            journal.forget(key)
        wait_until(
            lambda: journal._unwritten.n_bytes < 2 * 10**6 < held
        )  # but for one that is tried just then
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        wait_until(lambda: not journal._unwritten)
        n_failures = journal.n_failures
        asyncio.run(accept("e"))
        assert journal.n_failures == n_failures
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
        journal.close()
    journal = Journal(path)
    assert [entry.key for entry in journal.entries()] == ["d", "e"]
    journal.close()


def test_a_journal_without_memory_tries_again(tmp_path, monkeypatch):
    """Its thread goes on."""
    failed, write = [], journal_module._write_request

    def without_memory(*of_it):
        if not failed:
            failed.append(1)
            raise MemoryError
        write(*of_it)

    monkeypatch.setattr(journal_module, "_write_request", without_memory)
    journal = Journal(tmp_path / "journal.sqlite")
    asyncio.run(journal.accept(Entry("a", "/", b"", 0, 0)))
    journal.close()
    assert failed and journal.n_failures == 1
    journal = Journal(tmp_path / "journal.sqlite")
    assert [entry.key for entry in journal.entries()] == ["a"]
    journal.close()


def test_nobody_waits_for_a_journal_that_is_written_no_more(tmp_path, monkeypatch):
    monkeypatch.setattr(journal_module, "_ACCEPT_S", 600)
    journal = Journal(tmp_path / "journal.sqlite")

    def broken(group):
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(journal, "_committed", broken)
    for key in "ab":
        asyncio.run(asyncio.wait_for(journal.accept(Entry(key, "/", b"", 0, 0)), 60))
    journal.close()


# --- requests that go on together ---


@pytest.mark.parametrize(("n_expected", "n_come"), [(3, 3), (4, 3), (0, 1)])
def test_no_step_is_begun_before_all_that_go_on_together_are_there(llm, n_expected, n_come):
    """Nor waited for without end where one of them stays away."""
    n_waiting = []

    async def scenario():
        engine = AsyncEngine(
            llm.engine,
            Metrics("tiny"),
            prepare=lambda stopped: None,
            max_concurrent=9,
            before_step=lambda: n_waiting.append(len(llm.engine.scheduler.waiting)),
        )
        engine.start()
        assert await engine.started()
        all_answers = []
        for _ in range(n_come):
            all_answers.append(await engine.submit([Prompt(PROMPT)], KINDS["greedy"], n_together=n_expected))
            await asyncio.sleep(0.02)
        async with asyncio.timeout(60):
            for answers in all_answers:
                assert len([event async for _, event in answers]) == 24
        assert await engine.stop(60)

    asyncio.run(scenario())
    assert n_waiting[0] == n_come


def test_what_was_taken_before_is_not_too_much_at_once(llm):
    async def scenario():
        engine = AsyncEngine(llm.engine, Metrics("tiny"), prepare=lambda stopped: None, max_concurrent=1)
        engine.start()
        assert await engine.started()
        open_ = [await engine.submit([Prompt(PROMPT)], KINDS["greedy"], was_taken=n > 0) for n in range(3)]
        with pytest.raises(TooMany, match="1 requests are being answered"):
            await engine.submit([Prompt(PROMPT)], KINDS["greedy"])
        for answers in open_:
            assert len([event async for _, event in answers]) == 24
        assert await engine.stop(60)

    asyncio.run(scenario())


# --- what a server says to a supervisor ---


def test_nobody_but_its_supervisor_is_followed(tiny):
    options = ("--model", str(tiny), "--no-warm-up")
    body = b'{"key":"k","created":1,"seed":2}\n{"prompt":"w1","max_tokens":2}'
    with serving(*options) as server:
        assert server.request("POST", "/followed/v1/completions", body)[0] == 404


class OverSocket(http.client.HTTPConnection):
    def __init__(self, path):
        super().__init__("job", timeout=60)
        self._path = path

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(60)
        self.sock.connect(str(self._path))

    def post(self, path, body, headers):
        with closing(self):
            self.request("POST", path, body, headers)
            answer = self.getresponse()
            return answer.status, answer.read()


STREAMS = {
    "/v1/completions": {"prompt": "w1 w2", "max_tokens": 5},
    "/v1/completions with ids": {"prompt": "w1 w2", "max_tokens": 5, "return_token_ids": True},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "w3"}], "max_tokens": 5},
    "/v1/completions of several": {"prompt": ["w1 w2", "w3"], "n": 2, "temperature": 0.8, "max_tokens": 5},
    "/v1/chat/completions of two": {
        "messages": [{"role": "user", "content": "w3"}],
        "n": 2,
        "temperature": 0.8,
        "max_tokens": 5,
    },
    "/v1/responses": {"input": "w3", "max_output_tokens": 5},
}


def check_what_is_not_told_again(post, path):
    """Of a stream whose sequences go on after three tokens, of which a client has had two, the third comes
    again, and what comes after is as if all of them had come."""
    body = json.dumps(STREAMS[path] | {"stream": True, "ignore_eos": True}).encode()
    follow = {"key": "k", "created": 1, "seed": 2}

    def told(**more):
        status, lines = post("/followed" + path.split()[0], json.dumps(follow | more).encode() + b"\n" + body)
        assert status == 200, lines
        opening, *tokens, end = [msgspec.json.decode(line, type=Piece) for line in lines.splitlines()]
        assert opening.opening is not None and end.status == 200
        return opening, tokens, end

    opening, tokens, end = told()
    sequences = of_sequences(tokens)
    assert {ats for ats, _, _ in sequences.values()} == {tuple(range(5))}
    written = [(*of, ids[:3]) for of, (_, ids, _) in sequences.items()]
    n_given = [(*of, 2) for of in sequences]
    n_cached = [(which, 0) for which in range(len(opening.opening.n_prompt_tokens))]
    again = told(written=written, n_given=n_given, n_cached=n_cached, n_together=1)
    assert (again[0], again[2]) == (opening, end)
    later = {of: (ats[2:], ids[2:], texts[2:]) for of, (ats, ids, texts) in sequences.items()}
    assert of_sequences(again[1]) == later


def of_sequences(pieces):
    """Of each sequence its tokens' places, ids and texts."""
    found = {}
    for piece in pieces:
        found.setdefault(tuple(piece.of), []).append((piece.at, piece.token, piece.text))
    return {of: tuple(zip(*said, strict=True)) for of, said in found.items()}


def test_what_a_supervisor_is_told(tiny, tmp_path):
    path = tmp_path / "job.sock"
    words = [
        sys.executable,
        "-m",
        "jaxlamina",
        "serve",
        "--model",
        str(tiny),
        "--no-warm-up",
        "--max-body-mib",
        "1",
        "--uds",
        str(path),
        "--chat-template",
        WORDS_TEMPLATE,
    ]
    body = b'{"key":"k","created":1,"seed":2}\n{"prompt":"w1","max_tokens":2}'
    secret = {"X-JaxLamina-Supervisor": "abc"}
    process = subprocess.Popen(words, stderr=subprocess.DEVNULL, cwd=ROOT, env=environment(**{SECRET: "abc"}))
    try:
        until = time.monotonic() + 60
        while True:
            with suppress(OSError):
                status, lines = OverSocket(path).post("/followed/v1/completions", body, secret)
                if status == 200:
                    break
            assert time.monotonic() < until and process.poll() is None
            time.sleep(0.1)
        pieces = [msgspec.json.decode(line, type=Piece) for line in lines.splitlines()]
        assert pieces[0].opening == Opening(is_stream=False, n_prompt_tokens=(1,), n_choices=1)
        assert [piece.of for piece in pieces[1:-1]] == [(0, 0)] * 2 and pieces[-1].status == 200
        assert json.loads(pieces[-1].answer)["id"] == "cmpl-k"
        for headers in ({}, {"X-JaxLamina-Supervisor": "abd"}):
            assert OverSocket(path).post("/followed/v1/completions", body, headers)[0] == 404
        assert OverSocket(path).post("/followed/v1/other", body, secret)[0] == 404
        for wrong in (b"", b"{}", b"\xff\n{}", body.replace(b"1", b'"1"', 1), b"[" * 10**5, body + b"}"):
            status, found = OverSocket(path).post("/followed/v1/completions", wrong, secret)
            assert status == 400, found
        large = body + b" " * (2**20 - len(body) + 1)  # the line is more than a request may have
        assert OverSocket(path).post("/followed/v1/completions", large, secret)[0] == 200
        assert OverSocket(path).post("/followed/v1/completions", large, {})[0] == 413
        assert OverSocket(path).post("/v1/completions", large, secret)[0] == 413
        for kind in STREAMS:
            check_what_is_not_told_again(lambda to, body: OverSocket(path).post(to, body, secret), kind)
    finally:
        process.kill()
        process.wait()
