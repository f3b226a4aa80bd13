"""SmolLM2's perplexity on WikiText-2, decoded token by token through both workers."""

from __future__ import annotations

import hashlib
import json
import math
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
from checkpoint_examples import tiny_words_folder
from test_models import MODELS

from jaxlamina import LLM
from jaxlamina.bench.perplexity import by_kv_dtype, main, perplexity, windows_of
from jaxlamina.errors import UserError
from jaxlamina.models import ModelConfig, apply, random_params
from jaxlamina.run.local import LocalExecutor
from jaxlamina.workers.spec import KV_DTYPES

TEXT = Path(__file__).parent / "data" / "wiki.test.raw.head"
TEXT_SHA256 = "a692944c927f5db1be61ee0430f073ad0da33699f7d25eb54aa1317c2fe93a49"
# 20 windows of so many tokens from the beginning of the text (303,415 tokens, sha256 173c87a5…9e7dd08): what
# their tokens hash to, as little-endian int32, and their perplexity by transformers in float32, no BOS.
WINDOWS = {
    64: ("19fdf74c6f38251a92b058c3b5a084e6d2b35f173e6385f20d2626713e7d75b5", 93.063),
    256: ("4b1374b004e4fc40c45c3826330945c79430de6700209e98e6dc89bb71ce1a7c", 42.909),
    1024: ("9432f86c0d3d46ca12954e346761c4bd256f66fe6a78b0531a86ebdb98f0bc39", 23.229),
}


@pytest.mark.timeout(1800)  # a step of 20 rows is a tenth of a second and more
@pytest.mark.parametrize("length", [64, *(pytest.param(n, marks=pytest.mark.slow) for n in (256, 1024))])
def test_smollm2_on_wikitext_by_decode(length: int):
    """As transformers, over 20 windows as one batch."""
    tokens_sha256, expected = WINDOWS[length]
    assert hashlib.sha256(TEXT.read_bytes()).hexdigest() == TEXT_SHA256
    llm = LLM("smollm2-135m-instruct", max_num_seqs=20, max_model_len=length, kv_slots=20 * (length - 1))
    tokens = llm.tokenizer.encode(TEXT.read_text(encoding="utf-8"), add_special_tokens=False)
    windows = windows_of(tokens, 20, length)
    assert hashlib.sha256(windows.astype("<i4").tobytes()).hexdigest() == tokens_sha256
    result = perplexity(llm.executor, windows, buckets=llm.buckets)
    assert result.n_scored_tokens == 20 * (length - 1)
    assert result.value == pytest.approx(expected, abs=0.02)


FLOAT = WINDOWS[1024][1]


# 4 windows of 64 tokens, float32 KV: the value of this program, whose longer windows are transformers' above.
FLOAT_OF_A_FEW = 73.0851


def test_int8_kv_of_a_small_model(tmp_path: Path):
    """Each form is near float KV, and none is float KV."""
    folder = tiny_words_folder(tmp_path, max_position_embeddings=64)
    text = " ".join(f"w{i * i % 61}" for i in range(200))
    kv_dtypes = ["auto", "int8", "int8-channel", "int8-channel-asymmetric"]
    calibration = {"calibration_tokens": [*range(1, 64)]}
    found = [result.value for _, result in by_kv_dtype(folder, text, kv_dtypes, 4, 32, **calibration)]
    assert len(set(found)) == 4 and found[1:] == pytest.approx([found[0]] * 3, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", ["int8", "int8-channel", "int8-channel-asymmetric"])
def test_int8_kv_of_a_few_windows(kv_dtype: str):
    """Within 1 % of float KV. Scales by channel were chosen on other text."""
    text = TEXT.read_text(encoding="utf-8")
    ((_, result),) = by_kv_dtype("smollm2-135m-instruct", text, [kv_dtype], 4, 64)
    assert result.value == pytest.approx(FLOAT_OF_A_FEW, rel=0.01) and result.value != FLOAT_OF_A_FEW


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kv_dtype", ["int8", "int8-channel", "int8-channel-asymmetric"])
def test_smollm2_on_wikitext_through_int8_kv(kv_dtype: str):
    """Within 1 % of float KV: every read of every step but a token's own goes through int8."""
    text = TEXT.read_text(encoding="utf-8")
    ((_, result),) = by_kv_dtype("smollm2-135m-instruct", text, [kv_dtype], 20, 1024)
    assert result.n_scored_tokens == 20_460
    assert result.value == pytest.approx(FLOAT, rel=0.01)


@pytest.mark.slow
def test_int8_kv_stays_within_a_percent_and_the_program_says_so(capsys):
    """A small part of the same text; the whole of it is `slow`."""
    main([str(TEXT), "--windows", "4", "--window-tokens", "96", "--calibration-headroom", "3"])
    lines = capsys.readouterr().out.splitlines()
    values = json.loads(lines[-1])["perplexity"]
    assert tuple(values) == KV_DTYPES and len(set(values.values())) == 4
    for kv_dtype in KV_DTYPES[1:]:
        assert values[kv_dtype] == pytest.approx(values["auto"], rel=0.01)
    assert lines[1].startswith("KV auto") and lines[1].endswith("+0.000 %")
    with pytest.raises(UserError, match="there is no text file nowhere"):
        main(["nowhere"])
    with pytest.raises(UserError, match="there is no text file neither"):
        main([str(TEXT), "--calibration-file", "neither"])


def test_perplexity_is_that_of_the_whole_sequence_at_once():
    config = ModelConfig.from_hf(MODELS["llama"])
    params, device = random_params(config, seed=5), jax.devices()[0]
    windows = np.random.default_rng(0).integers(0, config.vocab_size, (3, 12), dtype=np.int32)
    positions = np.broadcast_to(np.arange(12, dtype=np.int32), windows.shape)
    logits = np.asarray(apply(config, params, windows, positions), np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    scored = np.take_along_axis(logprobs[:, :-1], windows[:, 1:, None], axis=-1)
    executor = LocalExecutor(
        partial(apply, config), params, n_slots=33, model_device=device, attention_device=device
    )
    steps: list[tuple[int, int]] = []
    got = perplexity(executor, windows, on_step=lambda *at: steps.append(at))
    assert got.n_scored_tokens == 33 and got.value == pytest.approx(math.exp(-scored.mean()), rel=1e-5)
    assert steps[0] == (1, 11) and steps[-1] == (11, 11)
    with pytest.raises(UserError, match="44 slots asked for"):
        perplexity(executor, np.zeros((4, 12), np.int32))


def test_windows_need_enough_text():
    assert windows_of(range(7), 3, 2).tolist() == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(UserError, match="need 8 tokens, the text has 7"):
        windows_of(range(7), 4, 2)
