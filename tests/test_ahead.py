"""Programs compiled by other threads: begun once, taken once, and what fails is raised where it is taken."""

from __future__ import annotations

import threading

import pytest

from jaxlamina.process.compile_ahead import Ahead, n_compiling


def test_what_is_begun_is_done_by_another_thread_and_taken_once():
    ahead: Ahead[str] = Ahead()
    assert len(ahead) == 0 and ahead.take("a") is None
    ahead.begin("a", lambda: threading.current_thread().name)
    ahead.begin("a", lambda: "twice")
    assert "a" in ahead and len(ahead) == 1
    name = ahead.take("a")
    assert name is not None and name.startswith("compile")
    assert "a" not in ahead and ahead.take("a") is None
    ahead.forget()
    assert name not in {thread.name for thread in threading.enumerate()}


def test_what_fails_is_raised_where_it_is_taken():
    ahead: Ahead[None] = Ahead()

    def fail() -> None:
        raise RuntimeError("no room")

    ahead.begin(1, fail)
    with pytest.raises(RuntimeError, match="no room"):
        ahead.take(1)
    assert ahead.take(1) is None
    ahead.forget()


def test_what_is_forgotten_is_not_begun_any_more_and_can_be_begun_anew():
    ahead: Ahead[int] = Ahead()
    go, begun = threading.Event(), []
    for key in range(n_compiling()):
        ahead.begin(key, lambda: begun.append(go.wait(10)) or 0)
    ahead.begin("later", lambda: begun.append("later") or 1)
    threading.Timer(0.1, go.set).start()
    ahead.forget()
    assert begun == [True] * n_compiling() and len(ahead) == 0
    ahead.begin("later", lambda: 2)
    assert ahead.take("later") == 2
    ahead.forget()
