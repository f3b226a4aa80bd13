"""What one request alone makes fail, at whatever place and step, ends that request: the others' tokens are
those of a lone run."""

from __future__ import annotations

import asyncio
import threading

import pytest
from checkpoint_examples import byte_model
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxlamina import LLM, SamplingParams, StructuredOutputs, UserError
from jaxlamina.engine.engine import Engine
from jaxlamina.sampling.structured import Grammars
from jaxlamina.server.async_engine import AsyncEngine, Prompt, TooMany, Unavailable
from jaxlamina.server.metrics import Metrics
from jaxlamina.server.workshop import Busy, Workshop

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PARAMS = {
    "plain": GREEDY,
    "two": SamplingParams(n=2, seed=1, max_tokens=12, ignore_eos=True),
    "logprobs": SamplingParams(temperature=0.0, max_tokens=12, logprobs=2, ignore_eos=True),
    "scored": SamplingParams(temperature=0.0, max_tokens=12, prompt_logprobs=2, ignore_eos=True),
    "grammar": SamplingParams(temperature=0.0, max_tokens=12, structured_outputs=StructuredOutputs(regex="[ab]{30}")),
    "beams": SamplingParams(temperature=0.0, max_tokens=12, use_beam_search=True, beam_width=2, logprobs=1),
}  # fmt: skip


class Panic(BaseException):
    """As libraries in Rust raise them."""


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(byte_model(), split=False, max_num_seqs=6, max_model_len=64, kv_slots=200)


@pytest.fixture(scope="module")
def alone(llm: LLM):
    [wanted] = llm.generate({"prompt_token_ids": [1, 2, 3]}, GREEDY)
    return wanted.token_ids


def sabotage(engine: Engine, request_id: str, place: str, at: int, error: BaseException) -> None:
    """Has the request's ``at``-th call of what ``place`` names raise ``error``."""
    job, _ = engine.postprocess.live[request_id]
    n_calls = 0

    def failing(wrapped):
        def call(*args, **options):
            nonlocal n_calls
            n_calls += 1
            if n_calls > at:
                raise error
            return wrapped(*args, **options)

        return call

    if place == "row":
        job.row = failing(job.row)
    elif place == "text":
        for c in job.continuations:
            c.text.add = failing(c.text.add)
            c.text.finish = failing(c.text.finish)
    elif place == "why_stop":
        job.why_stop = failing(job.why_stop)
    elif place == "beams":
        job.beams.step = failing(job.beams.step)
    else:
        job.output = failing(job.output)


def places(kind: str) -> list[str]:
    """Where it can fail. Rows that all take the likeliest token are not looked at one by one."""
    if kind == "beams":
        return ["beams", "output"]
    return ["text", "why_stop"] if kind == "plain" else ["row", "text", "why_stop"]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_others_go_on(llm: LLM, alone, data):
    engine = llm.engine
    engine.async_scheduling = data.draw(st.booleans())
    kind = data.draw(st.sampled_from(sorted(PARAMS)))
    place, at = data.draw(st.sampled_from(places(kind))), data.draw(st.integers(0, 8))
    error = data.draw(
        st.sampled_from([ValueError("odd"), RecursionError(), Panic("panicked"), MemoryError()])
    )
    first, bad, last = (
        engine.add_request([1, 2, 3], params) for params in (GREEDY, PARAMS[kind], GREEDY)
    )  # fmt: skip
    sabotage(engine, bad, place, 0 if place == "output" else at, error)
    outputs, errors = {}, []
    while not engine.idle:
        for event in engine.step():
            if event.error is not None:
                assert event.request_id == bad and event.output is None
                errors.append(event.error)
            elif event.output is not None:
                outputs[event.request_id] = event.output
    engine.check_integrity()
    assert engine.scheduler.room.n_used == 0 and not engine.postprocess.live
    assert outputs[first].token_ids == outputs[last].token_ids == alone
    [found] = errors
    assert found is error or "Panic" in str(found)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1)])
def test_what_ends_the_program_does(llm: LLM, error: BaseException):
    request_id = llm.engine.add_request([1, 2, 3], GREEDY)
    sabotage(llm.engine, request_id, "why_stop", 1, error)
    with pytest.raises(type(error)):
        while not llm.engine.idle:
            llm.engine.step()
    llm.engine.abort(request_id)


def test_generate_raises_it(llm: LLM, monkeypatch):
    def failing(*_):
        raise ValueError("odd")

    monkeypatch.setattr("jaxlamina.sampling.structured.Matcher.accept", failing)
    with pytest.raises(ValueError, match="odd"):
        llm.generate("ab", PARAMS["grammar"])
    with pytest.raises(ValueError, match="odd"):
        list(llm.stream("ab", PARAMS["grammar"]))
    assert llm.engine.idle and llm.engine.scheduler.room.n_used == 0


def serving(llm: LLM, scenario, **options) -> None:
    async def run() -> None:
        engine = AsyncEngine(
            llm.engine, Metrics("bytes"), prepare=lambda stopped: None, max_concurrent=99, **options
        )
        engine.start()
        assert await engine.started()
        await scenario(engine)
        await engine.drain(30)
        assert await engine.stop(30) and engine.state == "stopped"

    asyncio.run(run())


async def read(answers):
    try:
        return [event.token_id async for _, event in answers]
    finally:
        answers.close()


def test_a_server_ends_the_request_alone(llm: LLM, alone, monkeypatch):
    """Of two prompts of one request, too, when one fails."""

    def failing(self, token):
        raise Panic("panicked")

    monkeypatch.setattr("jaxlamina.sampling.structured.Matcher.accept", failing)

    async def scenario(engine: AsyncEngine) -> None:
        good = await engine.submit([Prompt([1, 2, 3])], GREEDY)
        bad = await engine.submit([Prompt([1, 2, 3]), Prompt([4])], PARAMS["grammar"])
        with pytest.raises(RuntimeError, match="Panic: panicked"):
            await read(bad)
        assert tuple(await read(good)) == alone and engine.state == "ready"

    serving(llm, scenario)


async def is_raised(engine: AsyncEngine, monkeypatch, add_job) -> None:
    """What the engine's ``add_job`` raises, in this place."""
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "add_job", add_job)
        with pytest.raises(OverflowError):
            await engine.submit([Prompt([1, 2, 3])], GREEDY)


def test_what_is_raised_before_the_first_step_is_the_requests(llm: LLM, alone, monkeypatch):
    def failing(self, job, **_):
        raise OverflowError("odd")

    async def scenario(engine: AsyncEngine) -> None:
        await is_raised(engine, monkeypatch, failing)
        with pytest.raises(ZeroDivisionError):
            await engine.ask(lambda _: 1 // 0, 60)
        assert tuple(await read(await engine.submit([Prompt([1, 2, 3])], GREEDY))) == alone

    serving(llm, scenario)


def test_a_request_that_fails_once_the_engine_has_it_leaves_nothing_there(llm: LLM, alone, monkeypatch):
    add_job = Engine.add_job

    def failing(self, job, **how):
        add_job(self, job, **how)
        raise OverflowError("odd")

    async def scenario(engine: AsyncEngine) -> None:
        await is_raised(engine, monkeypatch, failing)
        assert await engine.ask(lambda inner: (inner.idle, len(inner.postprocess.live)), 60) == (True, 0)
        assert tuple(await read(await engine.submit([Prompt([1, 2, 3])], GREEDY))) == alone

    serving(llm, scenario)


# --- grammars that take long ---


def test_a_grammar_that_takes_long_is_refused_and_nothing_piles_up(llm: LLM, alone, monkeypatch):
    go_on, at_work = threading.Event(), []
    make = Grammars.matcher

    def slow(self, asked):
        at_work.append(asked)
        assert go_on.wait(60)
        return make(self, asked)

    monkeypatch.setattr(Grammars, "matcher", slow)

    async def scenario(engine: AsyncEngine) -> None:
        ask = [engine.submit([Prompt([1])], PARAMS["grammar"]) for _ in range(5)]
        found = await asyncio.gather(*ask, return_exceptions=True)
        kinds = [type(error) for error in found]
        assert kinds.count(UserError) == 2 and kinds.count(TooMany) == 3 and len(at_work) == 2
        assert tuple(await read(await engine.submit([Prompt([1, 2, 3])], GREEDY))) == alone  # meanwhile
        go_on.set()
        while True:  # places come free again
            try:
                answers = await engine.submit([Prompt([1])], PARAMS["grammar"])
                break
            except (TooMany, UserError):
                await asyncio.sleep(0.05)
        assert len(await read(answers)) == 12

    serving(llm, scenario, grammar_timeout_s=0.5)


def regex(text: str) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=4, structured_outputs=StructuredOutputs(regex=text))


def test_grammars_of_batches_wait_and_leave_room_for_those_of_chats(llm: LLM, monkeypatch):
    """The first one of four of a batch takes too long; the others are not refused for that."""
    go_on, at_work = threading.Event(), []
    make = Grammars.matcher

    def slow(self, asked):
        at_work.append(asked.regex)
        if asked.regex.startswith("x"):
            assert go_on.wait(60)
        return make(self, asked)

    monkeypatch.setattr(Grammars, "matcher", slow)

    async def scenario(engine: AsyncEngine) -> None:
        def ask(text: str) -> asyncio.Future:
            return asyncio.ensure_future(engine.submit([Prompt([1])], regex(text), counted=False))

        lines = [ask(text) for text in ("x{1}", "x{2}", "x{3}", "x{3}")]
        with pytest.raises(UserError, match="longer than 0.5 s"):
            await lines[0]
        assert len(await read(await engine.submit([Prompt([1])], regex("[ab]{4}")))) == 4  # a chat
        lines[1].cancel()
        await asyncio.sleep(0.6)
        assert at_work == ["x{1}", "[ab]{4}"]
        go_on.set()
        for line in lines[2:]:
            assert len(await read(await line)) == 3
        assert at_work == ["x{1}", "[ab]{4}", "x{3}"]

    serving(llm, scenario, grammar_timeout_s=0.5)


def test_a_grammar_that_was_compiled_is_not_compiled_again(llm: LLM, monkeypatch):
    at_work = []
    make = Grammars.matcher

    def noted(self, asked):
        at_work.append(asked.kind)
        return make(self, asked)

    monkeypatch.setattr(Grammars, "matcher", noted)

    async def scenario(engine: AsyncEngine) -> None:
        async def answer(**asked) -> list[int]:
            params = SamplingParams(
                temperature=0.0, max_tokens=6, structured_outputs=StructuredOutputs(**asked)
            )
            return list(await read(await engine.submit([Prompt([1])], params)))

        first = await asyncio.gather(*(answer(regex="[ab]{6}") for _ in range(3)))
        n_first = len(at_work)
        assert n_first <= 2  # which are at it together
        assert [await answer(regex="[ab]{6}") for _ in range(2)] == first[:2] and len(at_work) == n_first
        for other in ({"choice": ["[ab]{6}"]}, {"choice": ["[ab]", "{6}"]}, {"json": {"type": "integer"}}):
            assert await answer(**other) != first[0]
            n_other = len(at_work)
            await answer(**other)
            assert len(at_work) == n_other
        assert len(at_work) == n_first + 3
        for i in range(8):
            await answer(choice=[f"choice {i}"])
        await answer(regex="[ab]{6}")
        assert len(at_work) == n_first + 3 + 9

    serving(llm, scenario)


def test_a_workshop_hands_on_what_is_raised_and_frees_its_place():
    async def scenario() -> None:
        workshop = Workshop(1)
        with pytest.raises(RuntimeError, match="Panic: odd"):
            await workshop.run(lambda: (_ for _ in ()).throw(Panic("odd")), 60)
        assert await workshop.run(lambda: 3, 60) == 3
        go_on = threading.Event()
        left = asyncio.ensure_future(workshop.run(lambda: go_on.wait(60), 60))
        await asyncio.sleep(0.05)
        left.cancel()  # by a caller that goes away
        with pytest.raises(Busy):
            await workshop.run(lambda: 4, 0.1)
        go_on.set()
        assert await workshop.run(lambda: 5, 60) == 5

    asyncio.run(scenario())


def test_an_engine_that_is_said_to_have_failed_tells_everybody(llm: LLM):
    async def scenario() -> None:
        engine = AsyncEngine(llm.engine, Metrics("bytes"), prepare=lambda stopped: None, max_concurrent=9)
        engine.start()
        assert await engine.started()
        answers = await engine.submit([Prompt([1, 2, 3])], GREEDY)
        engine.fail("attention rank 1 is gone")
        with pytest.raises(Unavailable, match="attention rank 1 is gone"):
            await read(answers)
        with pytest.raises(Unavailable):
            await engine.submit([Prompt([1])], GREEDY)
        await engine.stop(30)

    asyncio.run(scenario())
    for request_id in list(llm.engine.postprocess.live):
        llm.engine.abort(request_id)
