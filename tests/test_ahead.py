"""Programs compiled by other threads: begun once, taken once, and what fails is raised where it is taken."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlamina.process import kept_programs
from jaxlamina.process.compile_ahead import Ahead, ProgramAhead, n_compiling, only_compiled, side_by_side
from jaxlamina.process.turns import between_parts, wait_between_parts


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


def test_threads_that_compile_wait_as_the_one_that_began_them_does():
    """And those that others began do not."""
    waited: list[str] = []

    def begin() -> None:
        wait_between_parts(lambda: waited.append(threading.current_thread().name))
        ahead: Ahead[None] = Ahead(1)
        side_by_side([between_parts, lambda: side_by_side([between_parts])])
        ahead.begin("one", between_parts)
        ahead.take("one")
        ahead.forget()

    thread = threading.Thread(target=begin)
    thread.start()
    thread.join()
    assert [name.partition("_")[0] for name in waited] == ["compile"] * 3
    between_parts()
    side_by_side([between_parts])
    assert len(waited) == 3


def scaled(xs: tuple[jax.Array, Any], by: Any, *, twice: bool) -> jax.Array:
    x, more = xs
    return (x + more) * by * 3.25 ** (1 + twice)


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_program_is_traced_once_a_kind_of_argument_and_by_no_second_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_kept: bool
) -> None:
    monkeypatch.setattr(kept_programs, "folder", lambda: tmp_path if is_kept else None)
    jax.clear_caches()
    device = jax.devices()[-1]
    host, there = np.arange(4, dtype=np.float32), jax.device_put(np.ones(4, np.float32), device)
    calls: list[tuple[Any, ...]] = [
        ((there, host), 2, False),
        ((there, there), 2, False),
        ((there, host), 2.5, True),
        ((there, host), 2, True),
        ((jax.device_put(host[:2], device), host[:2]), 2, True),
        ((jnp.ones(4, jnp.float32), host), 2, True),  # where it is does not matter
    ]
    files = list[set[Path]]()
    for again in range(2):
        program = ProgramAhead(scaled, static=["twice"])
        if again and is_kept:
            monkeypatch.setattr(program, "_jitted", None)
        with only_compiled(device) as like:
            shape = program((like((4,), np.float32), host), 2, twice=False)
            assert (shape.shape, shape.dtype) == ((4,), np.float32)
            assert shape.sharding.device_set == {device} and program.n_programs == 1
        for _ in range(2):
            for xs, by, twice in calls:
                found = program(xs, by, twice=twice)
                assert found.device == (device if xs[0].committed else jax.devices()[0])
                expected = (np.asarray(xs[0]) + xs[1]) * by * 3.25 ** (1 + twice)
                np.testing.assert_allclose(found, expected, rtol=1e-6)
            assert program.n_programs == len(calls), "that of the first call was there"
        files.append({path for path in tmp_path.rglob("*") if path.is_file()})
    assert files[0] == files[1] and bool(files[0]) == is_kept


def test_a_function_without_a_name_of_its_own_has_no_kept_program() -> None:
    with pytest.raises(ValueError, match="a name of its own"):
        ProgramAhead(lambda x: x)
