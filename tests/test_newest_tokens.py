"""Tokens that stay on the device from one step to the next, against a dictionary of who got which."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxlamina.engine import in_flight
from jaxlamina.engine.in_flight import NewestTokens
from jaxlamina.engine.request import Request
from jaxlamina.sampling.sampler import Sampled

SIZE = 4  # rows of a batch, padding included


def requests(n: int) -> list[Request]:
    return [Request(f"r{i}", [1], 9, None) for i in range(n)]


def sampled(tokens: list[int]) -> Sampled:
    padded = jnp.asarray(tokens + [-7] * (SIZE - len(tokens)), jnp.int32)
    return Sampled(padded, column=padded[:, None])


# For each step its batches, each of some of eight requests in any order; then who decodes in the step after
# it, and which of them have their newest token on the host.
steps = st.lists(
    st.lists(st.permutations(range(8)), max_size=2).map(
        lambda orders: [order[: 1 + order[0] % SIZE] for order in orders]
    ),
    min_size=1,
    max_size=4,
)


@given(steps, st.permutations(range(8)), st.integers(1, SIZE), st.sets(st.integers(0, 7)))
def test_every_row_gets_its_newest_token(
    drawn: list[list[list[int]]], order: list[int], n_rows: int, on_host: set[int]
) -> None:
    known, newest = requests(8), NewestTokens(8 * 2, SIZE)
    latest: dict[int, int] = {}
    token = 100
    for batches in drawn:
        newest.begin()
        latest, taken = {}, set[int]()
        for batch in batches:
            rows = [i for i in batch if i not in taken]  # a request is in one batch of a step
            taken |= set(rows)
            if rows:
                tokens = list(range(token, token + len(rows)))
                token += len(rows)
                latest |= dict(zip(rows, tokens, strict=True))
                newest.keep([known[i] for i in rows], sampled(tokens))
    newest.begin()
    rows = order[:n_rows]
    for i in rows:
        known[i].n_in_flight = int(i in latest and i not in on_host)
    given_tokens = np.zeros((SIZE, 1), np.int32)
    given_tokens[:n_rows, 0] = rows
    found = np.asarray(newest.take([known[i] for i in rows], given_tokens))
    assert found.shape == (SIZE, 1)
    wanted = [latest[i] if known[i].n_in_flight else i for i in rows]
    assert found[:n_rows, 0].tolist() == wanted


@pytest.mark.parametrize("n_left", [3, 2])
def test_the_same_rows_launch_no_program(monkeypatch: pytest.MonkeyPatch, n_left: int) -> None:
    def fails(*_: Any) -> jax.Array:
        raise AssertionError("a program was launched")

    monkeypatch.setattr(in_flight, "_placed", fails)
    monkeypatch.setattr(in_flight, "_picked", fails)
    known, newest = requests(3), NewestTokens(8, SIZE)
    newest.begin()
    drawn = sampled([5, 6, 7])
    newest.keep(tuple(known), drawn)  # a step's rows may be a tuple or a list
    newest.begin()
    for request in known:
        request.n_in_flight = 1
    assert (
        newest.take(known[:n_left], np.zeros((SIZE, 1), np.int32)) is drawn.column
    )  # also when the last rows have ended
