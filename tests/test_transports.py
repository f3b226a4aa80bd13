"""Both transports under one suite, with real ranks: mpirun for `mpi`, plain processes and Gloo for `xla`.

Ranks stay up for all tests of a transport and a number of ranks; each test has them trace, compile and run a
program of their own (`transport_rank`) and looks at what they saw.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import jax
import msgspec
import numpy as np
import pytest

from jaxlamina.bench.exchange_ranks import RankError, Ranks
from jaxlamina.errors import UserError
from jaxlamina.steps.exchange import Exchange
from jaxlamina.transports import open_transport
from jaxlamina.transports.exchanges import first_difference

HERE = Path(__file__).parent
PATHS = {"PYTHONPATH": os.pathsep.join(map(str, (HERE.parent, HERE)))}
RANK = "transport_rank"
TRANSPORTS = (pytest.param("mpi", marks=pytest.mark.mpi), "xla")


class Kept:
    """Ranks that are started at their first use, and anew when a test has lost them."""

    def __init__(self, transport: str, n_ranks: int) -> None:
        self.transport, self.n_ranks = transport, n_ranks
        self._ranks: Ranks | None = None

    def ask(self, scenario: str, **request: Any) -> list[Any]:
        if self._ranks is None:
            self._ranks = Ranks(self.transport, self.n_ranks, RANK, environment=PATHS)
        ranks, self._ranks = self._ranks, None
        answers = ranks.ask({"do": scenario, **request})
        self._ranks = ranks
        return answers

    def close(self) -> None:
        if self._ranks is not None:
            self._ranks.close()


@pytest.fixture(scope="module", params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request: pytest.FixtureRequest, transport: str) -> Iterator[Kept]:
    kept = Kept(transport, request.param)
    yield kept
    kept.close()


def exchanges(builtins: list[dict[str, Any]]) -> tuple[Exchange, ...]:
    return msgspec.convert(builtins, tuple[Exchange, ...])


def listed(kept: Kept, shape: tuple[int, ...]) -> tuple[int, ...]:
    """A message's shape as exchanges have it: XLA's collectives carry one dimension."""
    return (math.prod(shape),) if kept.transport == "xla" else shape


def parts(kept: Kept, op: str, shape: tuple[int, ...]) -> tuple[Exchange, ...]:
    """What rank 0 exchanges for one message to each of the others (``op`` "send") or one from each ("recv").

    Over XLA, one all-to-all serves several workers; on CPU its operands are rows, of which one goes to each
    rank."""
    found = listed(kept, shape)
    if kept.transport == "xla" and kept.n_ranks > 2:
        return (Exchange("all", -1, found, "float32"),)
    return tuple(Exchange(op, rank, found, "float32") for rank in range(1, kept.n_ranks))


def fit(answers: list[Any]) -> bool:
    lists = {rank: exchanges(a["exchanges"]) for rank, a in enumerate(answers) if a is not None}
    return first_difference(lists) is None


def test_arrays_of_every_type_arrive_bit_by_bit(ranks):
    answers = ranks.ask("dtypes")
    assert [a["wrong"] for a in answers] == [[]] * ranks.n_ranks
    assert fit(answers)
    lead = exchanges(answers[0]["exchanges"])
    assert len(lead) == 2 * 6 * (ranks.n_ranks - 1)
    assert [e.op for e in lead[:4]] == ["send", "recv", "send", "recv"]
    assert {e.shape for e in lead} == {listed(ranks, (5, 3, 7))}
    assert [e.peer for e in lead[::12]] == list(range(1, ranks.n_ranks))


def test_order_is_kept_whatever_could_be_sent_or_used_first(ranks):
    answers = ranks.ask("order")
    assert answers[-1]["got"] == [55, 54, 53, 52, 51, 50]
    assert fit(answers)
    last = ranks.n_ranks - 1
    assert exchanges(answers[0]["exchanges"]) == 6 * (
        Exchange("send", last, listed(ranks, (8, 8)), "float32"),
    )
    if last == 2:
        assert answers[1] == {"got": [2.0], "exchanges": []}


@pytest.mark.parametrize("turns", [1, 4])
def test_one_message_to_each_and_one_from_each_in_a_loop(ranks, turns):
    answers = ranks.ask("each", turns=turns)
    others = range(1, ranks.n_ranks)
    total, kept = 0, dict.fromkeys(others, 0)
    for rank in others:
        kept[rank] = rank
    for _ in range(turns):
        for rank in others:
            kept[rank] += total + rank
        total += sum(rank * 2 * (total + rank) for rank in others)
    assert answers[0]["got"] == [[total] * 6] * 4
    for rank in others:
        assert answers[rank]["got"] == [[kept[rank]] * 6] * 4
    assert fit(answers)
    there, back = parts(ranks, "send", (4, 6)), parts(ranks, "recv", (4, 6))
    assert exchanges(answers[0]["exchanges"]) == turns * (there + back)
    if there[0].op == "all":  # every rank has the same two
        assert all(exchanges(a["exchanges"]) == turns * (there + back) for a in answers)


def called_again(n_kept: int = 0) -> list[dict[str, Any]]:
    """What ranks 0 and 1 see in five calls."""
    x, sent, got = 1.0, [], []
    for i in range(5):
        sent.append(x + i)
        x = 2 * (x + i)
        got.append(x)
    return [{"seen": seen, "state": 5.0, "n_compiling": 0, "n_kept": n_kept} for seen in (got, sent)]


def test_a_program_is_called_again_with_its_own_results_and_donated_state(ranks):
    assert ranks.ask("again")[:2] == called_again()


def check_programs_from_disk(transport: str, platform: str, variables: dict[str, str]) -> None:
    """Ranks that find all their programs on disk, and so lower none, exchange as those that made them."""
    found = []
    for _ in range(2):
        with Ranks(
            transport, 2, RANK, platforms=(platform, platform), environment=PATHS | variables
        ) as started:
            found.append(started.ask({"do": "again", "keeps": True}))
    assert found == [called_again(n_kept=0), called_again(n_kept=1)]


def test_programs_from_disk_exchange_as_before(transport, tmp_path):
    check_programs_from_disk(transport, "cpu", {"JAX_COMPILATION_CACHE_DIR": str(tmp_path)})


@pytest.mark.gpu
def test_programs_from_disk_exchange_as_before_on_a_gpu_that_ranks_share(tmp_path):
    """By MPI, which takes no GPU's memory."""
    variables = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": "0,0"}
    check_programs_from_disk("mpi", "cuda", variables)


@pytest.mark.parametrize("ranks", [2], indirect=True)
@pytest.mark.parametrize("number", [False, True])
def test_what_a_send_waits_for_does_not_change_it(ranks, number):
    assert ranks.ask("after", number=number)[1] == []


def test_ranks_add_up(ranks):
    answers = ranks.ask("sums")
    assert [a["wrong"] for a in answers] == [[]] * ranks.n_ranks and fit(answers)


# ---- lists


def test_lists_that_fit(ranks):
    answers = ranks.ask("lists", case="none")
    assert first_difference(dict(enumerate(map(exchanges, answers)))) is None


@pytest.mark.parametrize("case", ["shape", "dtype", "more"])
def test_a_difference_is_found_before_the_run(ranks, case):
    answers = ranks.ask("lists", case=case)
    line = first_difference(dict(enumerate(map(exchanges, answers))))
    last = ranks.n_ranks - 1
    together = parts(ranks, "send", (2, 8))[0].op == "all"
    sends, gets = f" to rank {last}", " from rank 0"
    right, longer = (f"[{', '.join(map(str, listed(ranks, shape)))}]" for shape in ((2, 8), (3, 8)))
    if together:
        says, hears, more = f"a collective of float32{right}", "a collective of {}", right
        sends = gets = ""
    else:
        says, hears, more = f"sends float32{right}", "receives {}", f"{right} to rank 0"
    wrong = {"shape": f"float32{longer}", "dtype": f"int8{right}"}
    if case == "more":
        what = f"{says.split(' float32')[0]} float32{more}"
        wanted = (
            f"rank {last}, exchange 3 of 3: {what}, but rank 0 has no more exchanges with rank {last} after 2"
        )
    else:
        other = wrong[case]
        # On rank 0 the exchanges with the ranks before the last come first, if they are not one.
        i, n = (1, 2) if together else (last, 2 * last)
        wanted = (
            f"rank 0, exchange {i} of {n}: {says}{sends}, but "
            f"rank {last}, exchange 1 of 2: {hears.format(other)}{gets}"
        )
    assert line == wanted


def test_what_xla_deletes_on_one_side_is_found_before_the_run(ranks):
    """It deletes a collective on the side where nothing uses the result; MPI's calls have effects, and
    stay."""
    answers = ranks.ask("lists", case="unused")
    line = first_difference(dict(enumerate(map(exchanges, answers))))
    sent = {2: "sends float32[16] to rank 0", 3: "a collective of float32[16]"}[ranks.n_ranks]
    assert line == (
        None
        if ranks.transport == "mpi"
        else f"rank 1, exchange 2 of 2: {sent}, but rank 0 has no more exchanges with rank 1 after 1"
    )


def test_a_float32_message_whose_tie_is_used_in_bfloat16_travels_as_float32(ranks):
    """XLA may move a conversion over a collective on the one side that wants it, and the other does not know:
    it did so on GPUs, where a tie was taken from what the send gave by its value."""
    answers = ranks.ask("narrow")
    assert all(a["right"] for a in answers)
    assert fit(answers)
    alone = (Exchange("send", 1, listed(ranks, (2, 8)), "float32"),)
    each = parts(ranks, "send", (2, 8)) + parts(ranks, "recv", (2, 8))
    assert exchanges(answers[0]["exchanges"]) == alone + each


@pytest.mark.multi_gpu
def test_a_float32_message_travels_in_four_bytes_between_gpus_too():
    with Ranks("xla", 2, RANK, platforms=("cuda", "cuda"), environment=PATHS) as gpus:
        answers = gpus.ask({"do": "narrow"})
    assert all(a["right"] for a in answers) and fit(answers)
    assert {np.dtype(e.dtype).itemsize for a in answers for e in exchanges(a["exchanges"])} == {4}


@pytest.mark.multi_gpu
@pytest.mark.parametrize("peer_memory", ["1", "0"])
def test_messages_between_gpus_by_memory_and_by_collectives(peer_memory):
    """In straight programs and in loops, called again, of sizes that fit and of others that go by
    collectives."""
    variables = PATHS | {"JAXLAMINA_PEER_MEMORY": peer_memory}
    with Ranks("xla", 2, RANK, platforms=("cuda", "cuda"), environment=variables) as gpus:
        answers = {name: gpus.ask({"do": name}) for name in ("dtypes", "order", "sums")}
        looped = [gpus.ask({"do": "each", "turns": turns}) for turns in (1, 4, 4)]
    assert [a["wrong"] for name in ("dtypes", "sums") for a in answers[name]] == [[]] * 4
    assert answers["order"][1]["got"] == [55, 54, 53, 52, 51, 50]
    assert [len(exchanges(a[0]["exchanges"])) for a in looped] == [2, 8, 8]
    assert all(fit(a) for a in (*answers.values(), *looped))
    ops = {e.op for a in answers["order"] for e in exchanges(a["exchanges"])}
    assert ops == ({"put", "take"} if peer_memory == "1" else {"send", "recv"})
    assert {e.op for a in answers["sums"] for e in exchanges(a["exchanges"])} == ops
    assert {e.op for a in answers["dtypes"] for e in exchanges(a["exchanges"])} == {"send", "recv"}


# ---- Q first


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_q_arrives_long_before_the_work_on_k_and_v_is_done(ranks):
    """Arrival times at the peer, over those of k and v, and the work alone: with the tie, and with q after k
    and v."""
    first = ranks.ask("q_first", tie=True, turns=60, rounds=6)
    last = ranks.ask("q_first", tie=False, turns=60, rounds=6)
    for answers in (first, last):
        assert answers[1]["right"] and fit(answers)
    work_s = min(first[0]["work_s"], last[0]["work_s"])
    # Not the first round: rank 0 may still be compiling when it begins.
    early, late = (answers[1]["arrivals_s"][1:] for answers in (first, last))
    assert median(q / kv for q, kv in early) < 0.3, early
    assert median(kv - q for q, kv in early) > 0.5 * work_s, (early, work_s)
    assert median(q / kv for q, kv in late) > 0.7, late


# ---- when something is wrong


def test_ranks_that_wait_for_ever_are_ended(transport):
    ranks = Ranks(transport, 2, RANK, environment=PATHS)
    began = time.monotonic()
    with pytest.raises(RankError, match="rank 0 did not answer in time"):
        ranks.ask({"do": "hang"}, deadline_s=3)
    assert time.monotonic() - began < 20


def test_a_rank_that_fails_says_so(transport):
    ranks = Ranks(transport, 2, RANK, environment=PATHS)
    with pytest.raises(RankError, match="rank 0: KeyError: 'no such scenario'"):
        ranks.ask({"do": "no such scenario"})


def test_ranks_that_cannot_start(tmp_path):
    (tmp_path / "never.py").write_text("print('this is why'); raise SystemExit(7)")
    paths = {"PYTHONPATH": os.pathsep.join(map(str, (HERE.parent, tmp_path)))}
    with pytest.raises(
        RankError, match=r"(?s)rank 0, 1 ended.*this is why.*rank \d .*ended with exit code 7"
    ):
        Ranks("xla", 2, "never", environment=paths)


def test_another_transport_is_an_error():
    with pytest.raises(UserError, match="'tcp' must be one of mpi, xla"):
        open_transport("tcp", 0, 2, jax.devices()[0])


def test_xla_without_its_other_processes_is_an_error():
    with pytest.raises(UserError, match="process 0 of 1 on cpu, the cluster rank 0 of 2"):
        open_transport("xla", 0, 2, jax.devices("cpu")[0])


@pytest.mark.mpi
def test_mpi_without_mpirun_is_an_error():
    code = "import jax; from jaxlamina.transports import open_transport; open_transport('mpi', 0, 2, jax.devices()[0])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert (
        "UserError: MPI says rank 0 of 1, the cluster rank 0 of 2: start the ranks with mpirun" in done.stderr
    )


@pytest.mark.mpi
@pytest.mark.parametrize("n_ranks", [2, 5])
def test_ranks_of_a_host_need_no_tcp(n_ranks):
    """MPI's shared memory serves them all; where it cannot, messages go by TCP, three times slower, and nobody
    says so."""
    with Ranks("mpi", n_ranks, RANK, environment=PATHS | {"OMPI_MCA_btl": "^tcp"}) as started:
        assert [a["wrong"] for a in started.ask({"do": "dtypes"})] == [[]] * n_ranks
