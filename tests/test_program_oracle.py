"""All ranks' programs of every layout × kind of step: both ends meet, and nobody waits in a circle. And the
oracle itself: what it takes for the same, and for another, program."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from program_oracle import (
    BATCH,
    KINDS,
    LAYOUTS,
    LIKE_OTHERS,
    MODEL,
    OracleTransport,
    TracedProgram,
    compared,
    difference,
    job_of,
    programs_of,
)

from pallas_kernels.order import tied

pytestmark = pytest.mark.usefixtures("unchecked")  # its transport compiles nothing


# `test_layouts` looks at the exchanges of the others' programs, too, and runs them.
@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[pytest.mark.slow] * (name not in LIKE_OTHERS)) for name in LAYOUTS]
)
def test_the_ranks_programs_fit_together(layout: str) -> None:
    found = {kind: programs_of(layout, kind) for kind in KINDS}
    traced = {kind: of for kind, of in found.items() if of is not None}
    assert len(traced) >= 2, found
    for kind, of in traced.items():
        assert isinstance(of, dict), (kind, of)
        # A model rank that keeps all of a step's KV runs it alone, and exchanges nothing.
        assert len(of) >= 2 or job_of(layout).layout.attends_locally
        assert all(bool(program.list) == (len(of) > 1) for programs in of.values() for program in programs)
        assert difference(of) is None, kind


def test_what_shards_of_a_model_exchange_in_a_step() -> None:
    """Looked-up rows; of each layer two sums, after attention and after the MLP; logits' columns, one way."""
    found = programs_of("two shards", "decode")
    assert isinstance(found, dict)
    of_rank, n_layers, hidden = found[1][0].list, len(job_of("two shards").specs), MODEL["hidden_size"]
    [sent, received] = [[e.shape for e in of_rank if e.op == op and e.peer == 0] for op in ("send", "recv")]
    rows = (BATCH, 1, hidden)
    columns = (BATCH, 1, MODEL["vocab_size"] // 2)
    tokens = [(BATCH // 4, 4)]
    assert sent == [rows] * (1 + 2 * n_layers) + [columns]
    assert received == tokens + [rows] * (1 + 2 * n_layers)
    # And with the attention worker its own heads: half of q, k and v, and of the output.
    of_worker = [e.shape for e in of_rank if e.peer == 2]
    half = hidden // 2
    kv = MODEL["num_key_value_heads"] * hidden // MODEL["num_attention_heads"]
    assert of_worker == [(BATCH * (half + kv),), (BATCH, 1, 2, half // 2)] * n_layers


def test_shards_that_cannot_share_heads_out_have_the_leader_talk_for_them() -> None:
    found = programs_of("three shards, which cannot share heads out", "decode")
    assert isinstance(found, dict)
    peers = [{e.peer for e in found[rank][0].list} for rank in range(3)]
    assert [3 in of for of in peers] == [True, False, False]


def test_a_program_that_sends_something_else_does_not_fit() -> None:
    found = programs_of("one worker", "decode")
    assert isinstance(found, dict)
    [program] = found[1]
    found[1] = [replace(program, list=program.list[1:])]
    line = difference(found)
    assert line is not None and "rank 0" in line


X = jax.ShapeDtypeStruct((3,), jnp.float32)


def traced(function: Any) -> TracedProgram:
    return TracedProgram.of(jax.make_jaxpr(function)(X, X))


def ring(x: jax.Array, y: jax.Array) -> jax.Array:
    end = OracleTransport(0, 2)
    tie = end.send(x + 1, 1)
    return end.recv(X, 1, tie) * y


def test_one_graph_is_one_program_whatever_its_order() -> None:
    def other_order(x: jax.Array, y: jax.Array) -> jax.Array:
        b = jnp.sin(y)
        return jnp.cos(x) * b

    assert traced(lambda x, y: jnp.cos(x) * jnp.sin(y)).hash == traced(other_order).hash
    assert traced(ring).hash == traced(ring).hash and len(traced(ring).list) == 2


@pytest.mark.parametrize(
    "other",
    [
        lambda x, y: ring(y, x),
        lambda x, y: ring(x, y) + 1,
        lambda x, y: ring(x, 2 * y),
        lambda x, y: (ring(x, y), OracleTransport(0, 2).send(x, 1))[0],
        lambda x, y: OracleTransport(0, 2).recv(X, 1) * y,
        lambda x, y: jax.jit(lambda a: ring(a, y) - 1)(x),
    ],
)
def test_another_graph_is_another_program(other: Any) -> None:
    assert traced(other).hash != traced(ring).hash


def test_what_only_waits_for_something_else_is_told_apart() -> None:
    def at_once(x: jax.Array, y: jax.Array) -> jax.Array:
        return OracleTransport(0, 2).recv(X, 1) * y + x

    def after(x: jax.Array, y: jax.Array) -> jax.Array:
        return tied(OracleTransport(0, 2).recv(X, 1, x) * y, y) + x

    assert traced(at_once).hash != traced(after).hash and traced(at_once).values == traced(after).values


def test_what_differs_is_said() -> None:
    was = {
        "a; decode": {"0": [["h", "v", "send"]], "1": [["g", "w", "recv"]], "2": [["k", "x"]]},
        "a; chunk": "refused: no",
    }
    assert compared(was, was) == []
    now: Any = {
        "a; decode": {"0": [["i", "u", "send"]], "1": [["g", "w", "take"]], "2": [["l", "x"]]},
        "b; decode": {"0": []},
    }
    assert compared(was, now) == [
        "a; chunk: gone",
        "a; decode: rank 0 differs in what it computes",
        "a; decode: rank 1 differs in what it exchanges",
        "a; decode: rank 2 differs in what it waits for",
        "b; decode: was nothing, is programs",
    ]
