"""What a process that serves leaves out of Python's collections."""

from __future__ import annotations

import gc
import weakref

import pytest
from test_models import MODELS

from jaxlamina import LLM, garbage
from jaxlamina.llm import InMemoryModel
from jaxlamina.models import ModelConfig, random_params
from jaxlamina.server.run import App
from jaxlamina.server.settings import Settings


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
