"""Ranks' programs in one process: in which order they are run, what is one call, and what is compiled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_models import MODELS
from test_workers import DEVICE, ONE_BUCKET, Rows, assert_close, make, on_devices

from jaxlamina.models import ModelConfig
from jaxlamina.steps.shape import StepShape
from jaxlamina.transports import local
from jaxlamina.transports.local import CompiledPieces, LocalTransport, RankProgram, Together

AT_EVERY_EXCHANGE: Mapping[str, int] = {}
THREE_LAYERS: Mapping[str, int] = {"cpu": 3}
X = jax.ShapeDtypeStruct((4,), jnp.float32)


def rows_of(n_layers: int, kind: str = "split") -> Rows:
    config = ModelConfig.from_hf(MODELS["llama"] | {"num_hidden_layers": n_layers})
    return Rows(make(config, kind=kind), buckets=ONE_BUCKET)


def steps_of(rows: Rows) -> dict[str, tuple[StepShape, Together]]:
    return {shape.kind: (shape, together) for shape, (together, *_) in rows.executor._steps.items()}


def test_joined_layers_compute_what_single_ones_do(monkeypatch):
    monkeypatch.setattr(local, "_ROUNDS_A_CALL", THREE_LAYERS)
    joined = rows_of(7).run(3)
    monkeypatch.setattr(local, "_ROUNDS_A_CALL", AT_EVERY_EXCHANGE)
    single = rows_of(7).run(3)
    assert joined.tokens == single.tokens
    for got, want in zip(joined.logits, single.logits, strict=True):
        assert_close(got, want, 1e-5)
    n_calls = [len(steps_of(rows)["decode"][1].pieces) for rows in (joined, single)]
    assert n_calls == [3, 16], "8 slices, 7 layers' attention, and what a rank ends with"


@pytest.mark.parametrize(
    ("kind", "n_a_call", "n_calls"), [("split", 3, 11), ("q first", 3, 21), ("split", 10, 4)]
)
def test_equal_layers_are_few_calls_and_three_programs(kind: str, n_a_call: int, n_calls: int, monkeypatch):
    monkeypatch.setattr(local, "_ROUNDS_A_CALL", {"cpu": n_a_call})
    rows = rows_of(30, kind)
    rows.prefill()
    before = rows.executor.programs.total
    rows.decode()
    shape, decode = steps_of(rows)["decode"]
    keys = [piece.key for piece in decode.pieces]
    n_programs = rows.executor.programs.counts[f"slices and attention, {shape}"]
    assert len(keys) == n_calls and len(set(keys)) == n_programs == rows.executor.programs.total - before
    # Of q first a call ends in the midst of every other layer.
    assert n_programs == (3 if kind == "split" else 4)
    own = [sum(len(v.aval.shape) == 3 and v.aval.shape[0] == rows.executor.n_slots for v in piece.block.invars)
           for piece in decode.pieces]  # fmt: skip
    assert sum(own) >= 60 and max(own) <= 2 * n_a_call + 2, "a piece is given the pools of its own layers"


def test_what_is_sent_is_not_kept_until_the_sender_is_done(monkeypatch):
    """Prompts' layers send k and v, and wait for nothing."""
    monkeypatch.setattr(local, "_ROUNDS_A_CALL", THREE_LAYERS)
    rows = rows_of(9)
    rows.prefill()
    _, prefill = steps_of(rows)["prefill"]
    assert len(prefill.pieces) == 4
    assert [len(piece.donated) for piece in prefill.pieces] == [6, 6, 6, 0]


def end(rank: int) -> LocalTransport:
    return LocalTransport(rank, 2, DEVICE)


def traced(rank: int, function: Callable[..., Any], **how: Any) -> RankProgram:
    return end(rank).compile_later(function, X, **how)()


def test_a_message_that_is_handed_on_and_given_back():
    def ask(x: jax.Array) -> jax.Array:
        end(0).send(x + 1, 1)
        return end(0).recv(X, 1)

    def echo(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        got = end(1).recv(X, 0)
        end(1).send(got, 0)
        return x * got, got

    programs = [traced(0, ask), traced(1, echo, donate_argnums=(0,))]
    assert [(e.op, e.peer) for program in programs for e in program.exchanges()] == [
        ("send", 1), ("recv", 1), ("recv", 0), ("send", 0)
    ]  # fmt: skip
    together, x, given = Together(programs, CompiledPieces()), jnp.arange(4.0), jnp.full(4, 2.0)
    came, (product, got) = together.run((x,), (given,))
    assert len(together.pieces) == 1 and given.is_deleted() and not x.is_deleted()
    np.testing.assert_array_equal(came, x + 1)
    np.testing.assert_array_equal(got, x + 1)
    np.testing.assert_array_equal(product, 2 * (x + 1))


def test_memory_that_another_rank_still_reads_is_not_given_away(monkeypatch):
    """What is handed over on one device is the sender's own array."""
    monkeypatch.setattr(local, "_ROUNDS_A_CALL", AT_EVERY_EXCHANGE)

    def keep(x: jax.Array) -> jax.Array:
        end(0).send(x, 1)
        return x * 2

    def read(x: jax.Array) -> jax.Array:
        got = end(1).recv(X, 0)
        return x + got

    together = Together([traced(0, keep, donate_argnums=(0,)), traced(1, read)], CompiledPieces())
    doubled, added = together.run((jnp.arange(4.0),), (jnp.ones(4),))
    np.testing.assert_array_equal(doubled, 2 * np.arange(4.0))
    np.testing.assert_array_equal(added, 1 + np.arange(4.0))


def test_ranks_that_wait_for_one_another_are_named():
    def first_receives(peer: int, x: jax.Array) -> jax.Array:
        got = end(1 - peer).recv(X, peer)
        end(1 - peer).send(x, peer)
        return got

    programs = [traced(rank, partial(first_receives, 1 - rank)) for rank in (0, 1)]
    with pytest.raises(RuntimeError, match=r"ranks \[0, 1\] wait for one another"):
        Together(programs, CompiledPieces())


TWO_DEVICES = """
import jax
from test_workers import Rows, config_of, random_params, partial, apply, LocalExecutor
from jaxlamina.transports.local import _Piece
first, second = jax.devices()
config = config_of("llama")
executor = LocalExecutor(
    partial(apply, config), random_params(config, seed=3), n_slots=60, model_device=first, attention_device=second
)
Rows(executor).run(1)
names = {first: "model", second: "attention"}
for shape, (together, *_) in executor._steps.items():
    if shape.kind == "decode":
        steps = [("piece on " if isinstance(s, _Piece) else "message to ") + names[s.device] for s in together._steps]
        print(len(executor.specs), steps)
"""


def test_pieces_on_two_devices_are_launched_side_by_side():
    """The model's call for k and v is launched before attention is, whose answer nothing else goes before."""
    n_layers, steps = on_devices(TWO_DEVICES, 2).split(" ", 1)
    layer = [*["piece on model", "message to attention"] * 2, "piece on attention", "message to model"]
    assert steps.strip() == str([*layer * int(n_layers), "piece on attention", "piece on model"])
