"""Other weights in a model that runs: in one process and over ranks, with requests in the middle of their text.

What a server does with that is in test_pause.py.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from checkpoint_examples import LLAMA, QWEN3, host_params, write_folder
from rank_jobs import run_job

from jaxlamina import LLM, SamplingParams
from jaxlamina.errors import UserError
from jaxlamina.models import ModelConfig
from jaxlamina.models.causal_lm import decoder
from jaxlamina.weights.replacing import check_same_model

PROMPT = [5, 9, 11, 3, 4, 17, 8, 2, 1, 6, 12, 40, 41, 50, 51, 52, 53, 54]
OTHER = [7, 8, 30, 31]
N, K = 24, 9
LIMITS: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 96, "dtype": "float32"}


def greedy(n: int = N) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True)


def tokens(llm: LLM, prompt: list[int] = PROMPT, n: int = N) -> list[int]:
    [output] = llm.generate({"prompt_token_ids": prompt}, greedy(n))
    return list(output.token_ids)


def folder(tmp_path: Path, name: str, seed: int) -> Path:
    return write_folder(tmp_path / name, LLAMA, host_params(LLAMA, seed))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    made = tmp_path_factory.mktemp("weights")
    return folder(made, "a", 1), folder(made, "b", 2)


@pytest.fixture(scope="module")
def of_b(folders: tuple[Path, Path]) -> LLM:
    """The model of the second folder, to compare with."""
    return LLM(folders[1], split=False, prefix_caching=False, **LIMITS)


@pytest.fixture(scope="module", params=["split", "unsplit"])
def llm(request: pytest.FixtureRequest, folders: tuple[Path, Path]) -> LLM:
    split = request.param == "split"
    workers = {"attention_workers": 2, "partition": "heads"} if split else {}
    return LLM(folders[0], split=split, **workers, **LIMITS)


def in_the_middle(llm: LLM, change: Any, n_before: int = K) -> tuple[list[int], list[int]]:
    """What two requests write, of which the first one has ``n_before`` tokens, or one more, when ``change`` is
    called. How many it had then is found by what a step had launched ahead, so the tokens say it."""
    engine = llm.engine
    ids = [engine.add_request(PROMPT, greedy())]
    found: dict[str, list[int]] = {ids[0]: []}
    while len(found[ids[0]]) < n_before:
        take(engine.step(), found)
    ids.append(engine.add_request(OTHER, greedy()))
    found[ids[1]] = []
    take(engine.step(), found)
    change()
    while not engine.idle:
        take(engine.step(), found)
    engine.check_integrity()
    return found[ids[0]], found[ids[1]]


def take(events: Any, found: dict[str, list[int]]) -> None:
    for event in events:
        assert event.error is None
        found[event.request_id].append(event.token_id)


def b_goes_on(of_b: LLM, of_a: list[int], got: list[int], prompt: list[int]) -> bool:
    """Whether ``got`` is what A writes up to some token, and after it what B does."""
    return any(got[:k] == of_a[:k] and got[k:] == tokens(of_b, prompt + got[:k], N - k) for k in range(1, N))


def test_another_folders_weights_write_its_tokens(llm: LLM, folders: tuple[Path, Path], of_b: LLM) -> None:
    a, b = folders
    of_a, compiled = tokens(llm), llm.stats()["n_compilations"]
    llm.update_weights(b)
    assert tokens(llm) == tokens(of_b) != of_a
    assert llm.stats()["n_prefix_hit_tokens"] == 0  # what A computed is not found
    got = in_the_middle(llm, lambda: llm.update_weights(a))
    assert got[0] != tokens(of_b) and got[0][:K] == tokens(of_b)[:K]
    assert tokens(llm) == of_a
    more = set(llm.stats()["compilations"])
    assert compiled <= llm.stats()["n_compilations"] and more
    # Whatever was there is not compiled again.
    assert all(n == 1 for name, n in llm.stats()["compilations"].items() if "step" in name)


def test_requests_go_on_with_the_new_weights(llm: LLM, folders: tuple[Path, Path], of_b: LLM) -> None:
    a, b = folders
    llm.update_weights(a)
    of_a = [tokens(llm, PROMPT), tokens(llm, OTHER)]
    for _ in range(2):  # the second time all programs are there
        before = llm.stats()["n_compilations"]
        dropped = in_the_middle(llm, lambda: llm.update_weights(b))
        compiled = llm.stats()["n_compilations"] - before
        for got, expected, prompt in zip(dropped, of_a, (PROMPT, OTHER), strict=True):
            assert b_goes_on(of_b, expected, got, prompt)
        llm.update_weights(a)
    assert compiled == 0
    kept = in_the_middle(llm, lambda: llm.update_weights(b, keep_kv=True))
    assert kept[0][:K] == of_a[0][:K] and kept[0] != dropped[0]  # B's next tokens after A's KV
    llm.update_weights(a)
    assert list(in_the_middle(llm, lambda: llm.update_weights(a, keep_kv=True))) == of_a


def test_arrays_by_name(llm: LLM, folders: tuple[Path, Path], of_b: LLM) -> None:
    llm.update_weights(folders[0])
    of_a = tokens(llm)
    given = host_params(LLAMA, 2)
    llm.update_weights(given)
    for x in given.values():
        x.fill(0)  # they were copied
    assert tokens(llm) == tokens(of_b)
    llm.update_weights({name: jax.numpy.asarray(x) for name, x in host_params(LLAMA, 1).items()})
    assert tokens(llm) == of_a


def wrong(tmp_path: Path) -> Iterator[tuple[Any, str]]:
    good = host_params(LLAMA, 2)
    name = "model.layers.1.mlp.up_proj.weight"
    yield {k: v for k, v in good.items() if k != name}, f"1 missing: {name}"
    yield good | {"another": good[name]}, "1 unexpected: another"
    yield good | {name: good[name].T}, rf"1 wrong shape: {name} is \[64, 96\] and must be \[96, 64\]"
    yield good | {name: good[name].astype(np.float16)}, f"{name} is float16 and must be float32"
    yield good | {name: 1}, f"{name} must be arrays"
    yield tmp_path / "none", "unknown model"
    yield write_folder(tmp_path / "qwen3", QWEN3, host_params(QWEN3)), "is another model.*model_type='qwen3'"
    for i, (change, says) in enumerate(
        (
            ({"rope_theta": 5e5}, "rope_theta=500000"),
            ({"rms_norm_eps": 1e-3}, "rms_norm_eps=0.001"),
            ({"max_position_embeddings": 112}, r"max_position_embeddings=112 \(128 now\)"),
            ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "linear"),
            ({"model_type": "mistral", "sliding_window": 16}, "sliding_window=16"),
        )
    ):
        yield write_folder(tmp_path / f"other{i}", LLAMA | change, good), f"is another model.*{says}"


SAME: dict[str, dict[str, Any]] = {
    "ids": {"bos_token_id": 1, "eos_token_id": [5, 6], "pad_token_id": 0},
    "names": {"model_type": "mistral", "sliding_window": None, "architectures": ["MistralForCausalLM"]},
    "longer": {"max_position_embeddings": 4096},
}


@pytest.mark.parametrize("change", SAME)
def test_what_computes_the_same_may_say_so_otherwise(
    folders: tuple[Path, Path], of_b: LLM, llm: LLM, tmp_path: Path, change: str
) -> None:
    """Tokens, names and a length are no part of what is computed."""
    llm.update_weights(folders[0])
    llm.update_weights(write_folder(tmp_path / change, LLAMA | SAME[change], host_params(LLAMA, 2)))
    assert tokens(llm) == tokens(of_b)


def test_a_length_counts_where_positions_are_scaled_by_it() -> None:
    scaled = LLAMA | {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
    now, longer = (decoder(ModelConfig.from_hf(scaled | {"max_position_embeddings": n})) for n in (128, 256))
    check_same_model(now, now, "m")
    with pytest.raises(UserError, match="max_position_embeddings=256"):
        check_same_model(now, longer, "m")


def test_what_does_not_fit_is_named_and_changes_nothing(
    llm: LLM, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    llm.update_weights(folders[0])
    of_a = tokens(llm)
    for source, says in wrong(tmp_path):
        with pytest.raises(UserError, match=says):
            llm.update_weights(source)
    assert tokens(llm) == of_a and llm.stats()["n_prefix_hit_tokens"] > 0


def test_kept_kv_of_other_weights_is_not_found(folders: tuple[Path, Path], of_b: LLM, tmp_path: Path) -> None:
    a, b = folders
    how: dict[str, Any] = {"prefix_caching": False, "kept_kv_slots": 200, **LIMITS}
    llm = LLM(a, kept_kv_folder=str(tmp_path), **how)
    long = [*PROMPT, *PROMPT]

    before = 0

    def hits(llm: LLM) -> int:
        """Since the last time: they go on over updates."""
        nonlocal before
        now = int(llm.stats()["n_kept_hit_tokens"])
        before, n = now, now - before
        return n

    of_a = tokens(llm, long)
    assert tokens(llm, long) == of_a and hits(llm) >= len(PROMPT)
    llm.update_weights(b)
    assert tokens(llm, long) == tokens(of_b, long) and hits(llm) == 0
    assert tokens(llm, long) == tokens(of_b, long) and hits(llm) >= len(PROMPT)  # B's own
    llm.update_weights(a, keep_kv=True)
    assert tokens(llm, long) == of_a and tokens(llm, long) == of_a and hits(llm) == 0
    llm.update_weights(b)
    assert tokens(llm, long) == tokens(of_b, long) and hits(llm) >= len(PROMPT)  # what B kept before
    del llm  # whose folder it is
    again, before = LLM(a, kept_kv_folder=str(tmp_path), **how), 0
    assert tokens(again, long) == of_a and hits(again) == 0


# --- pausing ---


def test_a_paused_engine_does_nothing(llm: LLM, folders: tuple[Path, Path]) -> None:
    llm.update_weights(folders[0])
    expected = [tokens(llm, PROMPT), tokens(llm, OTHER)]
    engine = llm.engine

    def stand_still() -> None:
        engine.pause("keep", clear_cache=True)
        assert engine.is_paused and not engine.idle
        given = engine.step()  # what a step that was launched has drawn
        assert engine.rests
        with pytest.raises(UserError, match="paused"):
            engine.step()
        engine._again = [*given]
        engine.resume()

    assert list(in_the_middle(llm, stand_still)) == expected
    found: dict[str, list[int]] = {engine.add_request(PROMPT, greedy()): []}
    take(engine.step(), found)
    engine.pause("wait")
    [first], late = found, engine.add_request(OTHER, greedy())
    gone = engine.add_request(OTHER, greedy())
    found[late] = []
    while not engine.rests:
        take(engine.step(), found)
    assert found[first] == expected[0] and not found[late]
    engine.abort(gone)  # one that has not been let in
    engine.resume()
    assert engine.pause("abort") == [late] and engine.idle
    engine.resume()
    engine.check_integrity()


# --- over ranks ---

SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("transport", "dop", "more"),
    [
        ("xla", (1, 1), {}),
        pytest.param("xla", (2, 1), {"n_batches": 3}, marks=SLOW),
        pytest.param("xla", (2, 1), {"tensor_parallel": 2}, marks=SLOW),
        pytest.param("xla", (2, 1), {"pipeline_parallel": 2}, marks=SLOW),
        pytest.param("xla", (1, 1), {"prefill_workers": 1}, marks=SLOW),
        pytest.param("xla", (1, 1), {"local_attention": "auto"}, marks=SLOW),
    ],
    ids=str,
)
def test_over_ranks(transport: str, dop: tuple[int, int], more: Mapping[str, Any]) -> None:
    [found] = run_job(transport, dop, [("updated", {"model": "llama"})], **more)
    assert found["same_before"] and found["same_after"] and found["same_again"], found
    assert found["differ"] and found["n_compiled"] == 0, found


@pytest.mark.parametrize("kv_dtype", ["int8", "int8-channel"])
def test_kept_kv_is_found_by_scales_that_it_was_kept_with(
    folders: tuple[Path, Path], tmp_path: Path, kv_dtype: str
) -> None:
    """Fixed scales are of the weights before an update, and of the length that requests may have: another process finds
    others. A scale a token is kept with it."""
    how = LIMITS | {
        "kv_dtype": kv_dtype,
        "kept_kv_folder": str(tmp_path),
        "kept_kv_slots": 400,
        "split": False,
    }

    def hits(source: Path, update: Path | None = None, **other: Any) -> int:
        llm = LLM(source, **how | other)
        if update is not None:
            llm.update_weights(update)
        tokens(llm)
        found = llm.stats()["n_kept_hit_tokens"]
        del llm
        gc.collect()  # whose folder it was
        return int(found)

    a, b = folders
    assert hits(a) == 0 and hits(a) > 0 and hits(a, b) == 0
    is_fixed = kv_dtype == "int8-channel"
    assert (hits(b) == 0) == is_fixed
    assert (hits(b, max_model_len=64) == 0) == is_fixed
