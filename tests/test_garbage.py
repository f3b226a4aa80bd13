"""What a process that serves leaves out of Python's collections."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from test_models import MODELS

from jaxlamina import LLM
from jaxlamina.job.control import messages as m
from jaxlamina.job.group import Watch
from jaxlamina.models import ModelConfig, random_params
from jaxlamina.process import garbage
from jaxlamina.ranks.served_rank import ServedRank
from jaxlamina.server.run import App
from jaxlamina.server.settings import Settings
from jaxlamina.steps.exchange import Exchange
from jaxlamina.steps.shape import StepShape
from jaxlamina.weights.sources import InMemoryModel


class Thing:
    other: Thing


def cycle() -> weakref.ref[Thing]:
    a, b = Thing(), Thing()
    a.other, b.other = b, a
    return weakref.ref(a)


@pytest.fixture
def unsettled():
    yield
    garbage.unsettle()


def test_what_is_garbage_goes_first_and_what_there_is_is_left_out(unsettled) -> None:
    gone = cycle()
    kept = cycle, Thing()
    garbage.settle()
    assert gone() is None and gc.get_freeze_count() > 1000
    assert not any(x is kept for x in gc.get_objects())
    later = cycle()
    gc.collect()
    assert later() is None  # what is made since is collected as ever
    garbage.unsettle()
    assert gc.get_freeze_count() == 0 and any(x is kept for x in gc.get_objects())


def test_a_server_that_is_ready_leaves_out_what_was_compiled(unsettled) -> None:
    config = ModelConfig.from_hf(MODELS["llama"])
    llm = LLM(InMemoryModel(config, random_params(config)), max_num_seqs=1, max_model_len=16)
    app = App(llm, Settings(("tiny",)), lambda n, n_all: None, lambda: None)
    assert gc.get_freeze_count() == 0
    app._prepare(lambda: False)
    assert gc.get_freeze_count() > 10_000
    app.close()
    assert gc.get_freeze_count() == 0


def n_full_collections(make: Callable[[], object]) -> int:
    found = 0

    def count(phase: str, info: dict[str, int]) -> None:
        nonlocal found
        found += phase == "start" and info["generation"] == 2

    gc.callbacks.append(count)
    try:
        make()
    finally:
        gc.callbacks.remove(count)
    return found


@pytest.fixture
def nothing_long_lived() -> Iterator[None]:
    """Python collects everything only if what is new is a quarter of what is old: the whole suite's objects
    are not counted."""
    gc.collect()
    gc.freeze()
    gc.collect()
    yield
    gc.unfreeze()


def many() -> list[list[int]]:
    return [[i] for i in range(400_000)]


@pytest.mark.usefixtures("nothing_long_lived")
def test_what_is_traced_behind_is_not_collected_with_everything() -> None:
    assert n_full_collections(many) > 0  # else this measures nothing
    before = gc.get_threshold()
    with garbage.young_only():
        assert n_full_collections(many) == 0
    assert gc.get_threshold() == before
    with pytest.raises(KeyError), garbage.young_only():
        raise KeyError
    assert gc.get_threshold() == before


class Compiled:
    def exchanges(self) -> tuple[Exchange, ...]:
        return ()


class Rank(ServedRank):
    """One whose programs are compiled when the test says so, and that is told ``messages``."""

    kind = "a test"

    def __init__(self, messages: Iterator[m.Message]) -> None:
        cluster: Any = None
        transport, client = SimpleNamespace(traceable=False, device=None), SimpleNamespace(host="here")
        client.receive, client.send = lambda _: next(messages), lambda answer: self.answers.append(answer)
        super().__init__(cluster, 1, transport, client, Watch(60, print))  # type: ignore[arg-type]
        self.answers: list[m.Prepared] = []
        self.may_end = threading.Event()

    def _compile_later(self, part: StepShape, behind: bool) -> Callable[[], tuple[Any, Any]]:
        return lambda: (Compiled(), None) if self.may_end.wait(60) else (None, None)

    def _kept(self, part: StepShape, behind: bool) -> None:
        return None


@pytest.fixture
def usual() -> Iterator[None]:
    """Python's settings as they were, whatever a test leaves."""
    thresholds, turn_s = gc.get_threshold(), sys.getswitchinterval()
    yield
    gc.set_threshold(*thresholds)
    sys.setswitchinterval(turn_s)


@pytest.mark.usefixtures("unchecked")
def test_a_rank_that_compiles_behind_lets_its_steps_go_first(
    monkeypatch: pytest.MonkeyPatch, usual: None
) -> None:
    """It collects once all programs are there, and not each time it is asked whether they are; until then
    threads have short turns."""
    n_settled, usual_s = 0, sys.getswitchinterval()

    def settle() -> None:
        nonlocal n_settled
        n_settled += 1

    shapes = [StepShape("decode", batch, 1, 64) for batch in (1, 2)]
    found = []

    def look() -> None:
        found.append((n_settled, sys.getswitchinterval() < usual_s / 10))

    def messages() -> Iterator[m.Message]:
        yield m.Prepare(StepShape("decode", 4, 1, 64))  # before anything is answered
        look()
        rank.may_end.clear()
        for shape in shapes:
            yield m.PrepareLater(shape, behind=True)
        for shape in shapes:
            yield m.Prepare(shape, wait=False)
        look()
        rank.may_end.set()
        for shape in shapes:
            yield m.Prepare(shape)
            look()
        yield m.Bye()

    monkeypatch.setattr(garbage, "settle", settle)
    rank = Rank(messages())
    rank.may_end.set()
    rank.run()
    assert found == [(1, False), (1, True), (1, True), (2, False)]
    assert sys.getswitchinterval() == usual_s
    assert [answer.exchanges for answer in rank.answers] == [(), None, None, (), ()]
