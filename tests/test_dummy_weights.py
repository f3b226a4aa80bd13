"""Random weights of a model's shape: no file of weights is read, and all else is the model's."""

from __future__ import annotations

import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from checkpoint_examples import tiny_words_folder
from serving import WORDS_TEMPLATE, serving

from jaxlamina import LLM, SamplingParams
from jaxlamina.errors import UserError
from jaxlamina.models import abstract_params
from jaxlamina.models.config_files import model_config
from jaxlamina.weights import DummyCheckpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint without its weights."""
    whole = tiny_words_folder(tmp_path_factory.mktemp("whole"), max_position_embeddings=64)
    found = tmp_path_factory.mktemp("dummy")
    for file in whole.iterdir():
        if not file.name.startswith("model"):
            shutil.copy(file, found)
    return found


def test_weights_are_of_the_shape_and_always_the_same(folder: Path) -> None:
    seen = []
    source = DummyCheckpoint(folder)
    params = source.load("bfloat16", jax.devices()[0], lambda done, total: seen.append((done, total)))
    shapes = abstract_params(source.config, "bfloat16")
    assert {k: (x.shape, x.dtype) for k, x in params.items()} == {
        k: (s.shape, s.dtype) for k, s in shapes.items()
    }
    assert seen[-1][0] == seen[-1][1] == sum(x.nbytes for x in params.values()) and len(seen) == len(params)
    again = DummyCheckpoint(folder).load("bfloat16")
    matrices = [name for name, x in params.items() if x.ndim == 2]
    assert len({np.asarray(params[name]).tobytes() for name in matrices}) == len(matrices) > 2
    assert all((params[name] == again[name]).all() for name in params)
    prompts, greedy = ["w1 w2 w3"], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    texts = [
        LLM(folder, load_format="dummy", split=split, max_num_seqs=1, max_model_len=32).generate(
            prompts, greedy
        )
        for split in (True, False)
    ]
    assert texts[0][0].token_ids == texts[1][0].token_ids and texts[0][0].outputs[0].text


def test_a_shape_alone_has_no_tokenizer() -> None:
    source = DummyCheckpoint("llama-3-8b")
    assert source.config == model_config("llama-3-8b") and source.eos_token_ids == source.config.eos_token_ids
    with pytest.raises(UserError, match="a shape alone has no tokenizer"):
        source.tokenizer()


def test_what_has_no_shape_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="'gpt-17' is no folder with a config.json"):
        LLM("gpt-17", load_format="dummy")
    with pytest.raises(UserError, match="has no config.json"):
        LLM(tmp_path, load_format="dummy")
    with pytest.raises(UserError, match="load_format='npz' must be one of auto, dummy"):
        LLM("smollm2-135m-instruct", load_format="npz")


def test_it_is_served_unsplit_and_warm(folder: Path) -> None:
    options = ("--max-num-seqs", "2", "--max-model-len", "32", "--chat-template", WORDS_TEMPLATE)
    with serving("--model", str(folder), "--load-format", "dummy", "--no-split", *options) as server:
        body = {"model": str(folder), "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        answer = server.post("/v1/completions", body | {"prompt": "w1 w2"})
        assert answer["usage"]["completion_tokens"] == 4 and answer["choices"][0]["text"]
        answer = server.post("/v1/chat/completions", body | {"messages": [{"role": "user", "content": "w3"}]})
        assert answer["choices"][0]["finish_reason"] == "length"
