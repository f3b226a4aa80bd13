"""Programs on disk under names of our own: a second job traces none, and gives the same; what is damaged or
another's is not taken."""

from __future__ import annotations

import logging
import os
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compile_events import compile_events
from flax_models import tied_scaled
from rank_jobs import run_job
from split_examples import llama_params, scanned_llama, stacked
from test_models import MODELS

from jaxlamina import LLM, FlaxModel, SamplingParams
from jaxlamina.engine.warm_up import warm_up
from jaxlamina.models import ModelConfig, random_params
from jaxlamina.process import kept_programs
from jaxlamina.ranks.attention_programs import attention_workspace_bytes
from jaxlamina.ranks.own_pace import PromptWorker
from jaxlamina.run.unsplit import UnsplitExecutor
from jaxlamina.steps.buckets import StepSizes
from jaxlamina.steps.layout import Layout as PoolLayout
from jaxlamina.transports.xla import XlaTransport
from jaxlamina.weights.sources import InMemoryModel
from jaxlamina.workers import capacity
from jaxlamina.workers.model_worker import ModelWorker
from jaxlamina.workers.spec import AttentionSpec, specs_of
from jaxlamina.workers.workspace import LargestStep
from pallas_kernels import use_backend
from splitter import split, trace


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(kept_programs, "folder", lambda: tmp_path / "whole")
    return tmp_path / "whole"


def name(*what: object) -> str:
    found = kept_programs.name_of(jax.devices()[0], *what)
    assert found is not None
    return found


def kept(what: str, factor: float = 2.0) -> str:
    """Each with another constant, so that none is in JAX's cache: XLA for CPUs cannot write what it has read
    there."""
    shape, more = jax.ShapeDtypeStruct((4,), jnp.float32), float(zlib.crc32(what.encode()))
    lowered = jax.jit(lambda x, named: {"out": factor * x + named["b"], "more": more * x}).lower(
        shape, {"b": shape}
    )
    compiled, can_be_kept = kept_programs.compiled(lowered, jax.devices()[0], None)
    assert can_be_kept
    kept_programs.save(name(what), compiled, ("a note", factor))
    return name(what)


def test_a_program_that_may_have_been_read_from_jaxs_cache_is_not_kept_on_a_cpu(folder: Path) -> None:
    """XLA writes it without its code, and who reads that fails when it is run."""
    assert jax.config.values["jax_compilation_cache_dir"], "conftest sets one"
    function, like = jax.jit(lambda x: jnp.sin(x) * 718281.5), jax.ShapeDtypeStruct((4,), jnp.float32)
    device, can_be_kept = jax.devices()[0], list[bool]()
    function.lower(like).compile()  # and written there
    jax.clear_caches()
    for _ in range(2):  # read there, then what this process has already
        can_be_kept.append(kept_programs.compiled(function.lower(like), device, None)[1])
    assert can_be_kept == [device.platform != "cpu"] * 2
    kept("one that is new")  # asserts that it can be


def test_a_folder_that_may_be_read_alone_is_of_use(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there, other = folder / kept("a"), folder / "another"
    other.touch()
    assert there.stat().st_mode == other.stat().st_mode

    def refused(*_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "utime", refused)
    found = kept_programs.load(name("a"), jax.devices()[:1])
    assert found is not None and found[1] == ("a note", 2.0)
    monkeypatch.setattr(Path, "read_bytes", refused)
    monkeypatch.setattr(Path, "exists", refused)
    assert kept_programs.load(name("a"), jax.devices()[:1]) is None
    lower = jax.jit(lambda x: x + 17.25).lower
    program = kept_programs.later(
        name("a"), lambda: lower(jnp.ones(2)), jax.devices()[:1], None, lambda: None
    )
    assert program()(jnp.ones(2)).tolist() == [18.25] * 2


@dataclass(frozen=True)
class Layout:
    workers: tuple[int, ...]


def test_a_name_is_the_same_for_the_same_and_another_for_anything_else(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {name("model", Layout((1,)), 3), name("model", Layout((1, 2)), 3), name("model", Layout((1,)), 4)}
    assert len(names) == 3 and name("model", Layout((1,)), 3) in names
    names.add(name(1))
    with jax.default_matmul_precision("highest"):
        names.add(name(1))
    with use_backend("xla"):
        names.add(name(1))
    monkeypatch.setenv("XLA_FLAGS", f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_enable_fast_math=false")
    names.add(name(1))
    assert len(names) == 7


def test_a_name_is_of_the_sources(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = name(1)
    kept_programs._made_by.cache_clear()
    assert name(1) == before
    monkeypatch.setattr(kept_programs, "_PACKAGES", ("jaxlamina", "splitter"))
    kept_programs._made_by.cache_clear()
    assert name(1).split("/")[0] != before.split("/")[0]
    monkeypatch.undo()
    kept_programs._made_by.cache_clear()


def test_what_differs_in_another_process_has_no_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert kept_programs.name_of(jax.devices()[0], object()) is None
    monkeypatch.setattr(kept_programs, "folder", lambda: None)
    assert kept_programs.name_of(jax.devices()[0], 1) is None


def test_a_kept_program_gives_what_it_gave_before(folder: Path) -> None:
    known = {factor: kept(f"times {factor}", factor) for factor in (2.0, 3.0)}
    x, named = jnp.arange(4.0), {"b": jnp.ones(4)}
    for factor, which in known.items():
        found = kept_programs.load(which, jax.devices()[:1])
        assert found is not None
        compiled, note = found
        assert note == ("a note", factor)
        np.testing.assert_array_equal(compiled(x, named)["out"], factor * x + 1)
    assert kept_programs.load(name("another"), jax.devices()[:1]) is None


def test_a_kept_program_is_not_in_jaxs_cache_too(folder: Path) -> None:
    def which_is_written_once(x: jax.Array) -> jax.Array:
        return x * float(zlib.crc32(b"once on disk"))

    def which_jax_keeps(x: jax.Array) -> jax.Array:
        return x * float(zlib.crc32(b"JAX keeps this"))

    def n_in_jaxs_cache(function: str) -> int:  # other tests write there meanwhile
        cache = Path(jax.config.values["jax_compilation_cache_dir"])
        return len(list(cache.glob(f"jit_{function}-*")))

    x = jnp.zeros(3)
    _, can_be_kept = kept_programs.compiled(jax.jit(which_is_written_once).lower(x), jax.devices()[0], None)
    jax.jit(which_jax_keeps).lower(x).compile()
    assert can_be_kept and n_in_jaxs_cache("which_is_written_once") == 0
    assert n_in_jaxs_cache("which_jax_keeps") > 0


@pytest.mark.parametrize("damage", [b"", b"no program", None])
def test_a_damaged_program_is_not_taken(
    folder: Path, damage: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    path = folder / kept(f"damaged by {damage!r}")
    path.write_bytes(path.read_bytes()[:-100] if damage is None else damage)
    with caplog.at_level(logging.WARNING):
        assert kept_programs.load(name(f"damaged by {damage!r}"), jax.devices()[:1]) is None
    assert "compiled again" in caplog.text and str(path) in caplog.text


def test_a_program_that_cannot_be_written_is_no_fault(folder: Path) -> None:
    folder.write_text("a file where the folder should be")
    kept("nowhere")
    assert folder.read_text().startswith("a file")


WARM = (
    StepSizes("decode", 4, 1, 64),
    StepSizes("prefill", 1, 32, 0),
    StepSizes("chunk", 1, 32, 64, of_all=True),
)


def warmed_up(options: dict[str, Any]) -> LLM:
    # A model of its own, so that none of its programs is in JAX's cache.
    config = ModelConfig.from_hf(MODELS["llama"] | {"max_position_embeddings": 64, "rms_norm_eps": 1.7e-5})
    source = InMemoryModel(config, random_params(config, seed=3))
    llm = LLM(source, split=False, max_num_seqs=4, max_model_len=64, **options)
    beside = [replace(WARM[0], alongside=WARM[1])] if options.get("mixed_steps") else []
    warm_up(llm.engine, [*WARM, *beside], lambda n: None, lambda: False, all_of_drawing=False)
    return llm


@pytest.mark.parametrize(
    "options",
    [
        {"mixed_steps": True, "kv_dtype": "int8-channel"},
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"dtype": "bfloat16", "kv_dtype": "int8"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_second_process_of_one_device_traces_no_step(
    folder: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """Whole steps: what is compiled ahead is kept, and taken by an executor that cannot trace any."""
    jax.clear_caches()  # what an earlier test compiled is not kept again
    params = [
        SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, prompt_logprobs=n) for n in (None, 1)
    ]
    found, counts, files = [], [], []
    for _ in range(2):
        llm = warmed_up(options)
        files.append({path for path in folder.rglob("*") if path.is_file()})
        counts.append(dict(llm.engine.executor.programs.counts))
        monkeypatch.setattr(UnsplitExecutor, "_program", None)  # from the first one's end on
        outputs = llm.generate([{"prompt_token_ids": [3, 5, 7]}, {"prompt_token_ids": [9, 4]}], params)
        found.append([(o.outputs[0].token_ids, o.prompt_logprobs) for o in outputs])
    assert found[0] == found[1] and counts[0] == counts[1] and sum(counts[0].values()) >= len(WARM)
    assert files[0] == files[1] and len(files[0]) > sum(counts[0].values()) + 3, "those that draw, too"


def test_what_a_step_needs_is_compiled_for_once(folder: Path) -> None:
    """A second start of the same model finds the number on disk; one of another largest step asks again."""
    spec, device = AttentionSpec(2, 8, np.dtype(np.float32), 0.5, None, None), jax.devices()[0]
    first = [attention_workspace_bytes([spec], [4], device, LargestStep(b, 64, 32)) for b in (1, 512)]
    [*files] = sorted(path for path in folder.rglob("*") if path.is_file())
    assert sorted(int(path.read_text()) for path in files) == sorted(first) and first[0] < first[1]
    files[0].write_text("no number")
    files[1].write_text("77")
    again = [attention_workspace_bytes([spec], [4], device, LargestStep(b, 64, 32)) for b in (1, 512)]
    assert 77 in again and len({*again, *first}) == 3


def test_a_second_start_asks_no_program_what_it_needs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the unsplit model, as on accelerators; for another length they are asked again."""
    asked = []
    monkeypatch.setattr(capacity, "is_accelerator", lambda device: True)
    monkeypatch.setattr(capacity, "free_memory_bytes", lambda device: (2**30, 0.9))
    monkeypatch.setattr(UnsplitExecutor, "workspace_bytes", lambda self, largest: asked.append(largest) or 7)
    config = ModelConfig.from_hf(MODELS["llama"])
    for length in (64, 64, 32):
        LLM(
            InMemoryModel(config, random_params(config, seed=3)),
            split=False,
            max_num_seqs=4,
            max_model_len=length,
        )
    assert [step.context for step in asked] == [64, 32]


def test_a_damaged_step_is_traced_again(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    x, found, traced = jnp.arange(4.0), [], []
    for damaged in (False, True, False):
        for path in folder.rglob("*"):
            if path.is_file() and damaged:
                path.write_bytes(b"no program")

        def lower() -> jax.stages.Lowered:
            traced.append(damaged)  # noqa: B023 (called within the loop)
            return jax.jit(lambda x: x * float(zlib.crc32(b"is damaged"))).lower(x)

        devices = jax.devices()[:1]
        program = kept_programs.later(name("damaged"), lower, devices, None, lambda: found.append(1))
        np.testing.assert_array_equal(program()(x), x * float(zlib.crc32(b"is damaged")))
    assert traced == [False, True] and len(found) == 1
    assert caplog.text.count("compiled again") == 1


def test_programs_of_old_sources_are_dropped(folder: Path) -> None:
    for i in range(6):
        old = folder / f"old-{i}"
        old.mkdir(parents=True)
        (old / "program").write_bytes(b"x")
        os.utime(old, (i, i))
    kept("new")
    left = {path.name for path in folder.iterdir()}
    assert left == {name("new").split("/")[0], "old-3", "old-4", "old-5"}


def test_unused_programs_make_room_and_what_was_not_written_is_removed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [folder / kept(f"room {i}") for i in range(3)]
    for i, path in enumerate(paths):
        os.utime(path, (i, i))
    left = paths[0].parent / "new-left"
    left.write_bytes(b"half of it")
    os.utime(left, (0, 0))
    assert kept_programs.load(name("room 0"), jax.devices()[:1]) is not None  # so it is of use
    monkeypatch.setattr(kept_programs, "MOST_BYTES", int(3.5 * paths[0].stat().st_size))
    last = folder / kept("room 3")
    assert [path.exists() for path in (*paths, last, left)] == [True, False, True, True, False]
    monkeypatch.setattr(kept_programs.zlib, "compress", lambda *_: 1 / 0)
    kept("no room")
    assert not list(folder.rglob("new-*"))


def test_a_name_is_of_the_processor_and_programs_are_kept_on_this_host_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = name(1)
    monkeypatch.setattr(kept_programs, "_processor", lambda: "another")
    assert name(1) != before
    monkeypatch.undo()
    cache = jax.config.values["jax_compilation_cache_dir"]
    assert kept_programs.folder() == Path(cache) / "whole"
    jax.config.update("jax_compilation_cache_dir", "gs://bucket/programs")
    try:
        assert kept_programs.folder() is None
    finally:
        jax.config.update("jax_compilation_cache_dir", cache)


def test_a_model_of_another_length_has_another_name() -> None:
    """Tables of its positions are constants of its programs."""
    fn, params = tied_scaled.build()
    names = {FlaxModel(fn, params, vocab_size=99, max_model_len=n).model.name for n in (24, 28, 28)}
    assert len(names) == 2


def test_sources_of_a_slices_parameters() -> None:
    params = stacked(llama_params(2))
    tokens = jnp.zeros((2, 1), jnp.int32)
    cut = split(trace(scanned_llama, params, tokens, tokens))
    leaves = jax.tree.leaves(params)
    n_known = n_views = 0
    for i in range(cut.n + 1):
        taken, sources = cut.slice_params(i, params), cut.sources(i)
        assert len(taken) == len(sources)
        for x, source in zip(taken, sources, strict=True):
            n_views += source is None
            if source is not None:
                n_known += 1
                np.testing.assert_array_equal(x, leaves[source] if isinstance(source, int) else source)
    assert n_known and n_views


def jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transport: str, dop: Any, **cluster: Any
) -> list[dict[str, Any]]:
    # One of JAX's, too: XLA for CPUs cannot write a program that it has read there.
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))
    scenario = [("greedy", {"model": "llama", "n_tokens": 12})]
    return [found for _ in range(2) for found in run_job(transport, dop, scenario, **cluster)]


def of_rank_0(programs: list[str]) -> set[str]:
    """Without the sampler's, and without what prefill workers run, alone or beside a decode step."""
    steps = [x for x in programs if x != "sampler" and (x.startswith("decode") or "on rank" not in x)]
    return {x.partition(", with")[0] if "on rank" in x else x for x in steps}


@pytest.mark.parametrize(
    ("transport", "dop", "cluster"),
    [
        ("xla", (1, 2), {}),
        pytest.param("xla", (1, 2), {"partition": "requests"}, marks=pytest.mark.slow),
        pytest.param("xla", (2, 1), {"tensor_parallel": 2}, marks=pytest.mark.slow),
        pytest.param("xla", (2, 1), {"pipeline_parallel": 2}, marks=pytest.mark.slow),
        pytest.param("xla", (1, 1), {"prefill_workers": 1}, marks=pytest.mark.slow),
        pytest.param("xla", (1, 1), {"n_batches": 2}, marks=pytest.mark.slow),
        pytest.param("mpi", (1, 2), {}, marks=pytest.mark.mpi),
        pytest.param("mpi", (2, 1), {}, marks=[pytest.mark.mpi, pytest.mark.slow]),
        pytest.param("mpi", (1, 1), {"prefill_workers": 1}, marks=[pytest.mark.mpi, pytest.mark.slow]),
    ],
)
def test_a_second_job_traces_none_of_rank_0s_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transport: str, dop: Any, cluster: dict[str, Any]
) -> None:
    first, second = jobs(tmp_path, monkeypatch, transport, dop, **cluster)
    assert first["same"] and second["same"]
    assert first["programs"] == second["programs"]
    assert first["n_kept"] == 0 and second["n_kept"] == len(of_rank_0(second["programs"]))


@pytest.mark.mpi
def test_without_native_code_programs_that_call_mpi_are_good_for_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAXLAMINA_CPU_KERNELS", "off")
    first, second = jobs(tmp_path, monkeypatch, "mpi", (1, 1))
    assert first["same"] and second["same"] and first["n_kept"] == second["n_kept"] == 0


@pytest.mark.parametrize("transport", ["xla", pytest.param("mpi", marks=[pytest.mark.mpi, pytest.mark.slow])])
def test_a_second_job_traces_none_of_a_prefill_workers_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    """Its own chunks', and those that send what came of them: each was kept by the first job, and read by the
    second, which keeps none."""
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))
    cluster = {"prefill_workers": 1, "prefill_chunk": 18}
    scenario = [("greedy", {"model": "llama", "n_tokens": 12})]

    def kept() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in tmp_path.glob("whole/*/*")}

    [first] = run_job(transport, (1, 1), scenario, **cluster)
    before = kept()
    [second] = run_job(transport, (1, 1), scenario, **cluster)
    assert first["same"] and second["same"] and second["n_prompt_tokens_own_pace"]
    after = kept()
    assert before.keys() == after.keys() and all(after[path] > at for path, at in before.items())


@pytest.mark.slow
def test_a_rank_that_is_another_in_a_larger_job_keeps_programs_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prefill worker's chunks are the same whoever is there; XLA has them for the device of one rank."""
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))
    scenario = [("greedy", {"model": "llama", "n_tokens": 12})]

    def run(dop: tuple[int, int]) -> dict[Path, bytes]:
        [found] = run_job("xla", dop, scenario, prefill_workers=1, prefill_chunk=18, partition="requests")
        assert found["same"] and found["n_prompt_tokens_own_pace"]
        return {path: path.read_bytes() for path in tmp_path.glob("whole/*/*")}

    before = run((1, 1))
    after = run((1, 2))
    assert before.items() <= after.items(), "nothing was found to be of no use, and written again"


def test_a_prefill_workers_chunks_are_read_from_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a second worker: nothing is traced or compiled, and the logits are the same to the bit."""
    monkeypatch.setattr(kept_programs, "folder", lambda: tmp_path)
    config = ModelConfig.from_hf(MODELS["llama"])
    source = InMemoryModel(config, random_params(config, seed=1))
    params, here = source.load(jnp.float32), jax.devices()[0]
    alone = XlaTransport(0, 1, here, False)
    tokens = np.arange(1, 9, dtype=np.int32)[None]
    found: list[Any] = []
    for _ in range(2):
        model = ModelWorker(source.model.fn, params, here)
        specs = specs_of(model.split(1).sites, "auto")
        worker = PromptWorker(
            alone, source.model.fn, model, PoolLayout((1,), "heads"), specs, 24, None, ("llama",)
        )
        how: dict[str, Any] = {"scored": False, "begin": lambda: 0}
        logits = []
        with compile_events() as events:
            for start in (0, 8):
                positions = np.arange(start, start + 8, dtype=np.int32)[None]
                _, out = worker.compute(tokens, positions, np.full(1, 7, np.int32), start, **how)
                logits.append(np.asarray(out))
        found.append((logits, len(events)))
    (first, n_first), (second, n_second) = found
    assert n_first > n_second == 0 and not np.array_equal(*first)
    assert all(map(np.array_equal, first, second))
