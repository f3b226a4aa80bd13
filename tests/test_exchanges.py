"""Exchange lists read from compiled programs, and how lists of several ranks are compared.

The programs' texts in `data/exchanges` are what JAX 0.10.2 and 0.11.2 compiled for a CPU; the GPU's forms
follow the HLO language. Ranks that really exchange are in `test_transports`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxlamina.steps.exchange import Exchange
from jaxlamina.transports.exchanges import first_difference, mpi_exchanges, xla_exchanges
from pallas_kernels.gpu.mail import Ring

DATA = Path(__file__).parent / "data" / "exchanges"
VERSIONS = ("jax0.10.2", "jax0.11.2")


def text(name: str, version: str) -> str:
    return (DATA / f"{name}-{version}.hlo").read_text()


def send(peer: int, *shape: int, dtype: str = "float32") -> Exchange:
    return Exchange("send", peer, shape, dtype)


def recv(peer: int, *shape: int, dtype: str = "float32") -> Exchange:
    return Exchange("recv", peer, shape, dtype)


def everyone(*shape: int, dtype: str = "float32") -> Exchange:
    return Exchange("all", -1, shape, dtype)


def entry(*lines: str, before: str = "") -> str:
    body = "\n".join(f"  {line}" for line in lines)
    return f"HloModule m, is_scheduled=true, num_partitions=3\n{before}\nENTRY %main (p: f32[4]) -> f32[4] {{\n{body}\n}}\n"


# ---- mpi4jax


@pytest.mark.parametrize("version", VERSIONS)
def test_mpi_calls_are_listed_in_order_without_the_tie(version):
    hlo = text("mpi", version)
    assert hlo.count("mpi_allreduce_ffi") == 1
    assert mpi_exchanges(hlo, 0) == (send(1, 4, 8, dtype="uint16"), send(2, 4, 8), recv(1, 4, 8))


@pytest.mark.parametrize("version", VERSIONS)
def test_mpi_calls_of_one_communicator(version):
    hlo = text("mpi", version)
    world = int(re.search(r"mpi_send_ffi.*comm = (\d+)", hlo)[1])
    alone = int(re.search(r"mpi_allreduce_ffi.*comm = (\d+)", hlo)[1])
    assert world != alone
    assert mpi_exchanges(hlo, 0, world) == mpi_exchanges(hlo, 0)
    assert mpi_exchanges(hlo, 0, alone) == (everyone(),)


@pytest.mark.parametrize("version", VERSIONS)
def test_mpi_calls_in_loops_are_repeated(version):
    turn = (send(1, 4, 8), *3 * (recv(1, 4, 8),))
    assert mpi_exchanges(text("mpi-loop", version), 0) == (*5 * turn, recv(2, dtype="int8"))


def test_of_mpi_messages_that_fall_together_both_ranks_list_the_lower_ones_first():
    def swapping(peer, out, back):
        attributes = f"{{dest = {peer} : i64, source = {peer} : i64, comm = 7 : i64}}"
        call = f'custom-call(%p), custom_call_target="mpi_sendrecv_ffi", backend_config={attributes}'
        return entry(f"%p = {out} parameter(0)", f"%r = {back} {call}")

    lists = {
        rank: mpi_exchanges(swapping(1 - rank, out, back), rank)
        for rank, (out, back) in enumerate([("f32[4,8]{1,0}", "u16[2]{0}"), ("u16[2]{0}", "f32[4,8]{1,0}")])
    }
    assert lists[0] == (send(1, 4, 8), recv(1, 2, dtype="uint16"))
    assert lists[1] == (recv(0, 4, 8), send(0, 2, dtype="uint16"))
    assert first_difference(lists) is None


def test_another_way_of_writing_attributes_is_an_error_and_no_empty_list():
    with pytest.raises(ValueError, match="no dest in the MPI call"):
        mpi_exchanges(text("mpi", VERSIONS[1]).replace("dest = ", "destination: "), 0)


# ---- XLA's collectives


@pytest.mark.parametrize("version", VERSIONS)
def test_xla_collectives_of_each_rank(version):
    hlo = text("xla", version)
    # bfloat16 goes through a CPU's permute as float32
    lists = {rank: xla_exchanges(hlo, rank) for rank in range(3)}
    swap_there, swap_back = send(1, 2, 8), recv(1, 2, 8)
    assert lists[0] == (
        send(1, 4, 8),
        send(2, 4, 8),
        recv(1, 4, 8, dtype="int8"),
        swap_there,
        swap_back,
        everyone(1, 2, 5),
    )
    assert lists[1] == (
        recv(0, 4, 8),
        send(0, 4, 8, dtype="int8"),
        recv(0, 2, 8),
        send(0, 2, 8),
        everyone(1, 2, 5),
    )
    assert lists[2] == (recv(0, 4, 8), everyone(1, 2, 5))
    assert first_difference(lists) is None


@pytest.mark.parametrize("version", VERSIONS)
def test_xla_collectives_in_loops_are_repeated(version):
    lists = {rank: xla_exchanges(text("xla-loop", version), rank) for rank in range(3)}
    assert lists[0] == 5 * (send(1, 4, 8), *3 * (recv(1, 4, 8),))
    assert lists[2] == ()
    assert first_difference(lists) is None


@pytest.mark.parametrize("read", [mpi_exchanges, xla_exchanges])
@pytest.mark.parametrize("version", VERSIONS)
def test_a_loop_without_a_trip_count_is_an_error(read, version):
    name = "mpi-loop" if read is mpi_exchanges else "xla-loop"
    hlo = re.sub(r',"known_trip_count":\{"n":"5"\}', "", text(name, version))
    with pytest.raises(ValueError, match="the loop 'while.*no fixed number of turns"):
        read(hlo, 0)


def test_a_loop_without_exchanges_may_be_of_any_length():
    hlo = text("xla-loop", VERSIONS[1])
    hlo = re.sub(r',"known_trip_count":\{"n":"\d"\}', "", hlo).replace("collective-permute(", "negate(")
    assert xla_exchanges(hlo, 0) == ()


def test_asynchronous_forms_are_listed_where_they_start():
    hlo = entry(
        "%p = bf16[4,8]{1,0} parameter(0)",
        "%s = (bf16[4,8]{1,0}, bf16[4,8]{1,0}) collective-permute-start(%p), channel_id=1, "
        'source_target_pairs={{0,1}}, backend_config={"collective_backend_config":{"is_sync":false}}',
        "%d = bf16[4,8]{1,0} collective-permute-done(%s)",
        "%a = ((bf16[4,8]{1,0}), bf16[4,8]{1,0}) all-to-all-start(bf16[4,8]{1,0} %d), channel_id=2, "
        "replica_groups={{0,1,2}}, dimensions={0}",
        "ROOT %e = bf16[4,8]{1,0} all-to-all-done(%a)",
    )
    assert xla_exchanges(hlo, 0) == (send(1, 4, 8, dtype="bfloat16"), everyone(4, 8, dtype="bfloat16"))
    assert xla_exchanges(hlo, 2) == (everyone(4, 8, dtype="bfloat16"),)


def test_calls_command_buffers_and_async_computations_are_followed():
    before = """
%inner (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  ROOT %c = f32[4]{0:T(128)} collective-permute(%x), source_target_pairs={{2,0}}
}

%command_buffer (y: f32[4]) -> f32[4] {
  %y = f32[4]{0} parameter(0)
  ROOT %f = f32[4]{0} fusion(%y), kind=kCustom, calls=%inner
}

%wrapped (z: s8[6]) -> s8[6] {
  %z = s8[6]{0} parameter(0)
  ROOT %r = s8[6]{0} all-reduce(%z), replica_groups=[1,3]<=[3], to_apply=%sum
}
"""
    hlo = entry(
        "%p = f32[4]{0} parameter(0)",
        "%one = f32[4]{0} call(%p), to_apply=%command_buffer",
        "%s = ((s8[6]{0}), s8[6]{0}, u32[]) async-start(%q), calls=%wrapped",
        "%t = s8[6]{0} async-done(%s)",
        "ROOT %two = f32[4]{0} call(%one), to_apply=%command_buffer",
        before=before,
    )
    assert xla_exchanges(hlo, 0) == (recv(2, 4), everyone(6, dtype="int8"), recv(2, 4))


def test_branches_must_exchange_alike():
    branch = """
%{name} (x: f32[4]) -> f32[4] {{
  %x = f32[4]{{0}} parameter(0)
  ROOT %c = f32[4]{{0}} collective-permute(%x), source_target_pairs={{{{0,{to}}}}}
}}
"""
    lines = ("%r = f32[4]{0} conditional(%i, %p, %p), branch_computations={%a, %b}",)
    alike = entry(*lines, before=branch.format(name="a", to=1) + branch.format(name="b", to=1))
    assert xla_exchanges(alike, 0) == (send(1, 4),)
    other = entry(*lines, before=branch.format(name="a", to=1) + branch.format(name="b", to=2))
    with pytest.raises(ValueError, match="the branches of 'r' have different exchanges"):
        xla_exchanges(other, 0)


def test_a_ragged_all_to_all_is_listed_by_its_rows():
    hlo = entry(
        "%x = bf16[16,2,8]{2,1,0} parameter(0)",
        "%o = bf16[5,2,8]{2,1,0} parameter(1)",
        "%n = s32[3]{0} parameter(2)",
        "ROOT %r = bf16[5,2,8]{2,1,0} ragged-all-to-all(%x, %o, %n, %n, %n, /*index=5*/%n), replica_groups={{0,1,2}}",
    )
    assert xla_exchanges(hlo, 1) == (everyone(2, 8, dtype="bfloat16"),)


GROUPS = {
    "replica_groups={}": [0, 1, 2],
    "replica_groups={{0,1,2}}": [0, 1, 2],
    "replica_groups=[1,3]<=[3]": [0, 1, 2],
    "replica_groups=mesh['ranks'=3] {'ranks'}": [0, 1, 2],
    "replica_groups={{0},{1},{2}}": [],
    "replica_groups=[3,1]<=[3]": [],
}


@pytest.mark.parametrize("groups", GROUPS)
def test_groups_of_a_collective(groups):
    hlo = entry(
        "%p = f32[4]{0} parameter(0)", f"ROOT %r = f32[4]{{0}} all-reduce(%p), {groups}, to_apply=%sum"
    )
    assert [rank for rank in range(3) if xla_exchanges(hlo, rank)] == GROUPS[groups]


@pytest.mark.parametrize(
    "groups",
    [
        "replica_groups={{0,1},{2,3}}",
        "replica_groups=[2,2]<=[2,2]T(1,0)",
        "replica_groups=mesh['a'=2,'b'=2] {'b'}",
    ],
)
def test_a_collective_of_some_ranks_is_refused(groups):
    hlo = entry(
        "%p = f32[4]{0} parameter(0)", f"ROOT %r = f32[4]{{0}} all-reduce(%p), {groups}, to_apply=%sum"
    )
    with pytest.raises(ValueError, match="of 2 of 4 ranks; it must be of all"):
        xla_exchanges(hlo, 2)


def test_an_array_that_travels_in_an_order_of_its_own_is_refused():
    def text(order):
        array = f"u32[1,64,9,65]{{{order}}}"
        permute = f"%r = {array} collective-permute(%p), source_target_pairs={{{{0,1}}}}"
        return entry(f"%p = {array} parameter(0)", permute)

    assert xla_exchanges(text("3,2,1,0"), 0) == (Exchange("send", 1, (1, 64, 9, 65), "uint32"),)
    with pytest.raises(ValueError, match="'r' sends an array whose dimensions lie in memory in an order"):
        xla_exchanges(text("3,1,0,2"), 0)


def test_what_is_not_understood_is_an_error_and_no_empty_list():
    with pytest.raises(ValueError, match="scheduled module"):
        xla_exchanges(text("xla", VERSIONS[1]).replace("is_scheduled=true, ", ""), 0)
    with pytest.raises(ValueError, match="no ENTRY"):
        mpi_exchanges("HloModule m, is_scheduled=true\n", 0)
    with pytest.raises(ValueError, match="send made from a permute"):
        xla_exchanges(entry("%s = (f32[4]{0}, u32[], token[]) send(%p, %t), channel_id=2"), 0)
    with pytest.raises(ValueError, match="groups of 'r' are written"):
        xla_exchanges(
            entry("%p = f32[4]{0} parameter(0)", "%r = f32[4]{0} all-reduce(%p), replica_groups=?"), 0
        )


COMPILED_HERE = """
import jax, jax.numpy as jnp, numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec as P
from jaxlamina.steps.exchange import Exchange
from jaxlamina.transports.exchanges import xla_exchanges

def step(x):
    def turn(x, _):
        x = lax.ppermute(x, "ranks", [(0, 2)])
        return lax.ppermute(x + 1, "ranks", [(2, 0)]), ()
    x, _ = lax.scan(turn, x, None, length=7)
    return lax.ppermute(x.astype(jnp.int8), "ranks", [(0, 1)])

mesh = Mesh(np.array(jax.devices()), ("ranks",))
step = jax.shard_map(step, mesh=mesh, in_specs=P("ranks"), out_specs=P("ranks"), check_vma=False)
hlo = jax.jit(step).lower(jnp.ones((12, 5))).compile().as_text()
there, back = Exchange("send", 2, (4, 5), "float32"), Exchange("recv", 2, (4, 5), "float32")
assert xla_exchanges(hlo, 0) == (*7 * (there, back), Exchange("send", 1, (4, 5), "int8")), xla_exchanges(hlo, 0)
"""


def test_what_this_jax_compiles_is_understood():
    env = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=3"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILED_HERE],
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]


# ---- several ranks


def worker(rank: int) -> str:
    return f"rank {rank} ({'model worker 0' if rank == 0 else f'attention worker {rank - 1}'})"


def test_lists_that_mirror_each_other():
    lists = {
        0: [send(1, 8), send(2, 8), recv(1, 4), recv(2, 4), everyone(3)],
        1: [recv(0, 8), send(0, 4), everyone(3)],
        2: [recv(0, 8), send(0, 4), everyone(3)],
    }
    assert first_difference(lists, worker) is None
    assert first_difference({}, worker) is None


def test_the_first_difference_names_ranks_indices_and_both_exchanges():
    lists = {
        0: [send(1, 8), send(2, 8), recv(1, 4), recv(2, 4)],
        1: [recv(0, 8), send(0, 4)],
        2: [recv(0, 8), send(0, 4, dtype="bfloat16")],
    }
    assert first_difference(lists, worker) == (
        "rank 0 (model worker 0), exchange 4 of 4: receives float32[4] from rank 2 (attention worker 1), "
        "but rank 2 (attention worker 1), exchange 2 of 2: sends bfloat16[4] to rank 0 (model worker 0)"
    )


@pytest.mark.parametrize("other", [recv(0, 9), recv(0, 8, dtype="int8"), send(0, 8), everyone(8)])
def test_each_kind_of_difference_is_found(other):
    line = first_difference({0: [send(1, 8)], 1: [other]})
    assert line is not None and line.startswith(
        "rank 0, exchange 1 of 1: sends float32[8] to rank 1, but rank 1"
    )


def test_a_list_that_ends_early():
    long, short = [send(1, 8), recv(1, 4)], [recv(0, 8)]
    line = "exchange 2 of 2: receives float32[4] from rank 1, but rank 1 has no more exchanges with rank 0 after 1"
    assert first_difference({0: long, 1: short}) == f"rank 0, {line}"
    mirrored = {0: [send(1, 8)], 1: [recv(0, 8), send(0, 4)]}
    found = first_difference(mirrored)
    assert found is not None and found.startswith("rank 1, exchange 2 of 2: sends float32[4] to rank 0")


def test_a_peer_outside_the_job():
    assert first_difference({0: [send(3, 8)], 1: []}) == (
        "rank 0, exchange 1 of 1: sends float32[8] to rank 3, which is not another rank of this job"
    )


def test_ranks_that_wait_in_a_circle_though_each_pair_fits():
    lists = {n: [recv((n - 1) % 3, 4), send((n + 1) % 3, 4)] for n in range(3)}
    found = first_difference(lists)
    assert found is not None and found.startswith(
        "ranks would wait for one another for ever: rank 0, exchange 1"
    )
    lists[0].reverse()
    assert first_difference(lists) is None


@given(st.data())
def test_lists_made_in_one_order_fit_and_any_one_change_is_found(data):
    n_ranks = data.draw(st.integers(2, 4))
    lists: dict[int, list[Exchange]] = {rank: [] for rank in range(n_ranks)}
    for _ in range(data.draw(st.integers(1, 12))):
        source, to = data.draw(st.permutations(range(n_ranks)))[:2]
        shape = tuple(data.draw(st.lists(st.integers(1, 3), max_size=2)))
        lists[source].append(send(to, *shape))
        lists[to].append(recv(source, *shape))
    assert first_difference(lists) is None
    rank = data.draw(st.sampled_from([r for r in lists if lists[r]]))
    i = data.draw(st.integers(0, len(lists[rank]) - 1))
    old = lists[rank][i]
    change = data.draw(st.sampled_from(["drop", "shape", "dtype", "op"]))
    if change == "drop":
        del lists[rank][i]
    elif change == "shape":
        lists[rank][i] = Exchange(old.op, old.peer, (*old.shape, 7), old.dtype)
    elif change == "dtype":
        lists[rank][i] = Exchange(old.op, old.peer, old.shape, "int8")
    else:
        lists[rank][i] = Exchange("send" if old.op == "recv" else "recv", old.peer, old.shape, old.dtype)
    assert first_difference(lists) is not None


def test_what_is_put_does_not_wait_and_what_is_taken_does():
    put, take = Exchange("put", 1, (8,), "float32"), Exchange("take", 1, (8,), "float32")
    back = Exchange("put", 0, (8,), "float32"), Exchange("take", 0, (8,), "float32")
    assert first_difference({0: [put, take], 1: list(back)}) is None  # both put first: a swap
    assert first_difference({0: [put, take], 1: list(back[::-1])}) is None
    assert "wait for one another for ever" in first_difference({0: [take, put], 1: list(back[::-1])})
    assert "has no more exchanges" in first_difference({0: [put, take, put], 1: list(back)})
    ahead = Ring().n_ahead
    many = {n: {0: n * [put] + n * [take], 1: n * [back[0]] + n * [back[1]]} for n in (ahead, ahead + 1)}
    assert first_difference(many[ahead]) is None
    assert "wait for one another for ever" in first_difference(many[ahead + 1])  # both rings are full
    other = Exchange("take", 0, (4,), "float32")
    assert "but rank 1, exchange 2 of 2: receives float32[4]" in first_difference(
        {0: [put, take], 1: [back[0], other]}
    )


def test_kernels_that_put_and_take_are_read_from_their_scopes():
    hlo = """HloModule m, is_scheduled=true

ENTRY main {
  x = bf16[64,128]{1,0} parameter(0)
  t = s32[2,16]{1,0} parameter(1)
  p = f32[1]{0} custom-call(x, t), custom_call_target="mosaic_gpu_v2", metadata={op_name="jit(step)/exchange/put.1/_put/x"}
  s = bf16[4,8]{1,0} custom-call(x, t, p), custom_call_target="mosaic_gpu_v2", metadata={op_name="jit(step)/exchange/sum.1-3/_add_up/x"}
  ROOT y = bf16[32]{0} custom-call(t, p), custom_call_target="mosaic_gpu_v2", metadata={op_name="jit(step)/exchange/take.2/x"}
}
"""
    summed = [Exchange(op, peer, (4, 8), "bfloat16") for op in ("put", "take") for peer in (1, 3)]
    assert xla_exchanges(hlo, 0) == (
        Exchange("put", 1, (64, 128), "bfloat16"),
        *summed,
        Exchange("take", 2, (32,), "bfloat16"),
    )
