"""What does not fit is refused in one line with the bytes wanted and there, before anything is allocated."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from checkpoint_examples import tiny_words_folder
from serving import environment

from jaxlamina import LLM, UserError
from jaxlamina.cli.main import main
from jaxlamina.process.host_memory import host_free_bytes
from jaxlamina.weights.dummy import DummyCheckpoint
from jaxlamina.workers import AttentionSpec, capacity
from jaxlamina.workers.capacity import check_slots, check_weights
from jaxlamina.workers.kv_pools import KVPools

MIB = 2**20
SPEC = AttentionSpec(2, 16, np.dtype(np.float32), 0.25, None, None)
LIMITED = """
import resource, sys
from jaxlamina import LLM, UserError
model = sys.argv[1]
used = int(open("/proc/self/statm").read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (used + 2**31, used + 2**31))
try:
    LLM(model, kv_slots=12_000_000, max_num_seqs=2, max_model_len=64)  # in four arrays of 0.7 GiB each
except UserError as error:
    print(error)
"""


class Gpu:
    """As much of a device as is asked about memory."""

    platform = "gpu"

    def __init__(self, limit: int, used: int = 0) -> None:
        self.stats = {"bytes_limit": limit, "bytes_in_use": used}

    def memory_stats(self) -> dict[str, int]:
        return self.stats

    def __str__(self) -> str:
        return "gpu:0"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_words_folder(tmp_path_factory.mktemp("tiny"), max_position_embeddings=8192)


@pytest.fixture
def nothing_is_allocated(monkeypatch):
    """No pool is made, no weight is read."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("allocated")

    monkeypatch.setattr("jaxlamina.weights.checkpoint.StreamedCheckpoint.load", refuse)
    monkeypatch.setattr("jaxlamina.workers.kv_pools._empty", refuse)
    monkeypatch.setattr(KVPools, "__init__", refuse)


def test_a_host_has_what_its_groups_and_limits_leave(tmp_path: Path, monkeypatch):
    proc, groups, own = tmp_path / "meminfo", tmp_path / "cgroup", tmp_path / "self"
    proc.write_text("MemAvailable: 900000 kB\n")
    (groups / "a" / "b").mkdir(parents=True)
    own.mkdir()
    (own / "cgroup").write_text("0::/a/b\n")
    (own / "statm").write_text("10 5 1 1 0 1 0\n")

    def free() -> int:
        return host_free_bytes(proc, groups, own)

    def limit(
        folder: Path, most: str, used: str, names: tuple[str, str] = ("memory.max", "memory.current")
    ) -> None:
        for name, text in zip(names, (most, used), strict=True):
            (folder / name).write_text(text + "\n")

    assert free() == 900_000 * 1024
    limit(groups / "a" / "b", "max", "1000")
    limit(groups / "a", "500000", "200000")  # a parent's limit counts
    assert free() == 300_000
    (groups / "a" / "memory.stat").write_text("anon 1\ninactive_file 150000\n")  # cached files are given back
    assert free() == 450_000
    # Version 1, where the memory controller has a tree of its own.
    v1 = groups / "memory" / "c"
    v1.mkdir(parents=True)
    (own / "cgroup").write_text("5:cpu,memory:/c\n4:pids:/a/b\n")
    limit(v1, "70000", "30000", ("memory.limit_in_bytes", "memory.usage_in_bytes"))
    (v1 / "memory.stat").write_text("inactive_file 1\ntotal_inactive_file 1000\n")
    assert free() == 41_000
    page = os.sysconf("SC_PAGE_SIZE")
    monkeypatch.setattr(resource, "getrlimit", lambda which: (10 * page + 4000, 0))
    assert free() == 4000


@pytest.mark.usefixtures("unchecked")
def test_slots_that_were_asked_for_are_held_against_the_memory_there_is():
    specs, gpu = [SPEC] * 4, Gpu(1100 * MIB, used=100 * MIB)
    for n in (1, 500 * 1024, 1000 * 1024):
        check_slots(n, specs, gpu)
    line = r"kv_slots=1024001 take 1,000 MiB of KV, and 1,000 MiB are free on gpu:0: at most 1024000 fit; leave kv_slots out"
    with pytest.raises(UserError, match=line):
        check_slots(1024001, specs, gpu)
    check_slots(2 * 1024000, specs, gpu, share=0.5)  # its share of two workers'
    asked: list[object] = []

    def step(device: object) -> int:
        asked.append(device)
        return 300 * MIB

    check_slots(500 * 1024, specs, gpu, workspace_bytes=step)
    assert not asked  # finding that out takes compiling: half of the memory is left in any case
    check_slots(700 * 1024, specs, gpu, workspace_bytes=step)
    with pytest.raises(UserError, match="of KV and 300 MiB for the largest step, and .* at most 716800 fit"):
        check_slots(701 * 1024, specs, gpu, workspace_bytes=step)


@pytest.mark.usefixtures("unchecked")
def test_weights_are_held_against_the_memory_there_is(tiny: Path, monkeypatch):
    check_weights(1000 * MIB, "bfloat16", Gpu(1000 * MIB))
    line = "the weights take 1,001 MiB as float32, and 1,000 MiB are free on gpu:0: take a smaller model, dtype=bfloat16"
    with pytest.raises(UserError, match=line):
        check_weights(1001 * MIB, "float32", Gpu(1000 * MIB))
    monkeypatch.setattr(DummyCheckpoint, "load", lambda *_: pytest.fail("read"))
    with pytest.raises(
        UserError, match=r"the weights take 26\d,\d{3} MiB as float32, and [\d,]+ MiB are free"
    ):
        LLM("llama-2-70b", load_format="dummy")


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize(
    ("options", "line"),
    [
        (
            {"kv_slots": 10**12},
            r"kv_slots=1000000000000 take [\d,]+ MiB of KV, and [\d,]+ MiB are free on .*: at most",
        ),
        (
            {"host_kv_slots": 10**12},
            r"host_kv_slots=1000000000000 take [\d,]+ MiB of host memory, and [\d,]+ MiB are",
        ),
        (
            {"max_num_seqs": 10**9},
            r"max_num_seqs=1000000000 requests of max_model_len=8192 tokens takes [\d,]+ MiB .*, and [\d,]+ MiB are free",
        ),
        ({"attention_workers": 2, "kv_slots": 10**12}, r"kv_slots=1000000000000 take"),
    ],
)
def test_a_model_beyond_memory_is_refused_unallocated(tiny: Path, options, line, split, nothing_is_allocated):
    if not split and "attention_workers" in options:
        options = {"kv_slots": 10**12}
    with pytest.raises(UserError, match=line) as error:
        LLM(str(tiny), split=split, compilation_cache=False, **options)
    assert "\n" not in str(error.value)


def test_the_server_says_so_in_its_own_words(tiny: Path, capsys, monkeypatch, nothing_is_allocated):
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert main(["serve", "--model", str(tiny), "--port", "0", "--kv-slots", "999999999999"]) == 2
    *_, line = capsys.readouterr().err.strip().splitlines()
    assert re.match(
        r"error: --kv-slots 999999999999 take [\d,]+ MiB of KV, and .*; leave --kv-slots out", line
    ), line


def test_a_process_with_a_limited_address_space_is_refused_in_time(tiny: Path):
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tiny)],
        env=environment(), capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert re.match(r"kv_slots=12000000 take 2,930 MiB of KV, and [\d,]+ MiB are free", done.stdout), (
        done.stdout
    )


@pytest.mark.parametrize(
    ("local", "words"),
    [
        ("0", r"error: rank 1 \(attention worker 0\): kv_slots=999999999999 take [\d,]+ MiB"),
        (
            "auto",
            r"error: rank 0 \(model worker 0\): --kv-slots 999999999999, and all ranks together have room",
        ),
    ],
)
def test_ranks_hold_their_shares_against_their_own_memory(tiny: Path, local: str, words: str):
    command = ["-m", "jaxlamina", "launch", "--dop", "1,1", "--local-attention", local, "--model", str(tiny)]
    command += ["--set", "kv_slots=999999999999", "--", "generate", "w1", "--raw", "--max-tokens", "2"]
    done = subprocess.run(
        [sys.executable, *command],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    line = done.stderr.strip().splitlines()[-1]
    assert done.returncode != 0 and "Traceback" not in done.stderr, done.stderr
    assert re.match(words, line), done.stderr


def test_what_is_chosen_fits_what_is_checked():
    device = jax.devices("cpu")[0]
    n = capacity.slots_that_fit([SPEC], device, most=10**9, least=1)
    check_slots(n, [SPEC], device)
