"""`LLM` as vLLM's users know it: bare token ids as prompts, bars, the tokenizer; and advice that can be
followed."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_examples import tiny_words_folder
from serving import environment

from jaxlamina import LLM, SamplingParams, UserError
from jaxlamina.weights.sources import InMemoryModel

GREEDY = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_words_folder(tmp_path_factory.mktemp("tiny"), max_position_embeddings=128)


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(str(folder), max_num_seqs=2, max_model_len=64, kv_slots=128)


class Bar:
    """As much of tqdm as is used."""

    made: list[Bar] = []  # noqa: RUF012

    def __init__(self, **options: Any) -> None:
        self.options, self.n, self.closed = options, 0, False
        Bar.made.append(self)

    def update(self, n: int) -> None:
        self.n += n

    def close(self) -> None:
        self.closed = True


def test_bare_token_ids_are_prompts(llm: LLM):
    want = [
        out.token_ids
        for out in llm.generate([{"prompt_token_ids": [1, 2, 3]}, {"prompt_token_ids": [4, 5]}], GREEDY)
    ]
    for prompts in ([[1, 2, 3], [4, 5]], [(1, 2, 3), np.array([4, 5])], ["w1 w2 w3", [4, 5]]):
        outputs = llm.generate(prompts, GREEDY)
        assert [out.token_ids for out in outputs] == want
        assert outputs[1].prompt is None and list(outputs[1].prompt_token_ids) == [4, 5]
    for prompt in ([1, 2, 3], (1, 2, 3), np.array([1, 2, 3], np.int32), jnp.array([1, 2, 3])):
        for given in (prompt, {"prompt_token_ids": prompt}):
            assert [out.token_ids for out in llm.generate(given, GREEDY)] == want[:1]
    assert llm.generate(np.array([[1, 2, 3], [1, 2, 3]]), GREEDY)[1].token_ids == want[0]
    assert "".join(llm.stream([1, 2, 3], GREEDY)) == llm.generate("w1 w2 w3", GREEDY)[0].text
    assert llm.generate([], GREEDY) == []


@pytest.mark.parametrize(
    ("how", "line"),
    [
        ({"sampling_params": [None]}, "sampling_params must be a SamplingParams, or a list of them"),
        (
            {"sampling_params": {"max_tokens": 3}},
            "sampling_params must be a SamplingParams, or a list of them",
        ),
        ({"priority": 3}, "priority=3 must be a list, one each for the prompts"),
    ],
)
def test_what_goes_with_no_prompt_is_refused(llm: LLM, how: dict[str, Any], line: str):
    with pytest.raises(UserError, match=line):
        llm.generate([[1]], **how)
    assert llm.stats()["kv_slots_used"] == 0


def test_threads_share_the_engine(llm: LLM):
    """Each has its own prompts' tokens, whoever runs the steps; also where one ends early."""
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    prompts = [[[1 + i, 2 + j, 3] for j in range(3)] for i in range(4)]
    want = [[out.token_ids for out in llm.generate(of_one, params)] for of_one in prompts]
    start = threading.Barrier(5)

    def ask(of_one: list[list[int]]) -> list[Any]:
        start.wait(30)
        return [[out.token_ids for out in llm.generate(of_one, params)] for _ in range(4)]

    def stop_early() -> None:
        start.wait(30)
        for _ in range(8):
            stream = llm.stream([7, 8], params)
            next(stream)
            stream.close()
            llm.reset_prefix_cache()

    with ThreadPoolExecutor(5) as threads:
        early = threads.submit(stop_early)
        found = [*threads.map(ask, prompts)]
        early.result()
    assert found == [[of_one] * 4 for of_one in want]
    llm.engine.check_integrity()
    assert llm.stats()["kv_slots_used"] == 0


@pytest.mark.parametrize(
    ("prompts", "line"),
    [
        ([[]], "the prompt is empty"),
        ([1, "w1"], "prompt token id 'w1' is not a whole number"),
        ([1, True], "prompt token id True is not a whole number"),
        ([[1, 2.5]], "prompt token id 2.5 is not a whole number"),
        ([[1, 64]], "prompt token id 64 is not in the vocabulary"),
        ([None], "a prompt must be a string, a list of token ids, "),
        ([b"bytes"], "a prompt must be a string, a list of token ids, "),
        ([[[1]]], r"prompt token id \[1\] is not a whole number"),
        (None, "prompts must be a prompt or a list of them, not None"),
        ({"prompt_token_ids": None}, "a prompt's token ids must be a list of them, not None"),
        ({"prompt_token_ids": jnp.array(5)}, "a prompt's token ids must be a list of them, not 5"),
        ({"prompt_token_ids": jnp.array([1.0])}, "prompt token id 1.0 is not a whole number"),
    ],
)
def test_what_is_no_prompt_is_refused(llm: LLM, prompts: Any, line: str):
    with pytest.raises(UserError, match=line):
        llm.generate(prompts, GREEDY)
    assert llm.stats()["kv_slots_used"] == 0


def test_a_callable_makes_the_bar(llm: LLM):
    Bar.made.clear()
    llm.generate([[1], [2], [3]], GREEDY, use_tqdm=Bar)
    seen: list[str] = []
    llm.generate([[1]], GREEDY, use_tqdm=Bar, on_token=lambda event: seen.append(event.new_text))
    assert [(bar.options["total"], bar.n, bar.closed) for bar in Bar.made] == [(3, 3, True), (1, 1, True)]
    assert len(seen) == 5
    with pytest.raises(UserError):
        llm.generate([[1], []], GREEDY, use_tqdm=Bar)
    assert all(bar.closed for bar in Bar.made)


def test_bars_are_for_terminals(llm: LLM, folder: Path, capsys, monkeypatch):
    llm.generate([[1]], GREEDY)
    LLM(str(folder), max_num_seqs=1, max_model_len=32, kv_slots=32)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes stderr for a terminal then
    monkeypatch.setenv("TERM", "xterm")
    llm.generate([[1], [2]], GREEDY)
    out, err = capsys.readouterr()
    assert out == "" and "prompts" in err
    LLM(str(folder), max_num_seqs=1, max_model_len=32, kv_slots=32)
    out, err = capsys.readouterr()
    assert out == "" and "reading weights" in err
    llm.generate([[1]], GREEDY, use_tqdm=False)
    llm.generate([[1]], GREEDY, on_token=lambda event: None)
    calls: list[int] = []
    LLM(
        str(folder), max_num_seqs=1, max_model_len=32, kv_slots=32, on_load=lambda done, _: calls.append(done)
    )
    LLM(str(folder), max_num_seqs=1, max_model_len=32, kv_slots=32, use_tqdm_on_load=False)
    assert capsys.readouterr() == ("", "") and calls


def test_the_tokenizer_is_there_or_missed_in_a_line(llm: LLM):
    tokenizer = llm.get_tokenizer()
    assert tokenizer.encode("w3 w5") == [3, 5] and tokenizer.vocab_size == 64
    bare = LLM(InMemoryModel(llm.config, llm.executor.model.params), max_num_seqs=1, max_model_len=32)
    with pytest.raises(UserError, match=r"get_tokenizer\(\) needs a tokenizer \(this model has none\)"):
        bare.get_tokenizer()


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        ({}, "one token is to be generated: shorten the prompt"),
        ({"max_model_len": 32}, "shorten the prompt, or raise max_model_len, to 128 at most"),
        ({"kv_slots": 20}, "shorten the prompt, or give more kv_slots than 20"),
    ],
)
def test_the_advice_for_a_long_prompt_can_be_followed(folder: Path, options: dict[str, int], advice: str):
    model = LLM(str(folder), max_num_seqs=1, **options)
    with pytest.raises(UserError) as error:
        model.generate([1] * 128, GREEDY)
    assert str(error.value).endswith(advice)


def test_help_shows_the_public_names_and_importing_stays_cheap():
    script = (
        "import sys, jaxlamina\nassert not {'jax', 'numpy', 'rich'} & sys.modules.keys(), 'not cheap'\n"
        "assert set(jaxlamina.__all__) <= set(dir(jaxlamina)) and 'jax' not in sys.modules\nimport pydoc\n"
        "print(pydoc.plain(pydoc.render_doc(jaxlamina)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    described = done.stdout.partition("PACKAGE CONTENTS")[0]
    for name in (
        "LLM",
        "SamplingParams",
        "StructuredOutputs",
        "RequestOutput",
        "CompletionOutput",
        "UserError",
    ):
        assert f"`{name}`" in described and f"    class {name}(" in done.stdout, name
    assert "A model ready to write." in done.stdout and "max_num_seqs" in done.stdout
