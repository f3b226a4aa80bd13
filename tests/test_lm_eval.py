"""lm-evaluation-harness's own program, unchanged, against a server process: its numbers are those of
transformers."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from serving import environment, serving
from test_demo_model import NAME, demo_file, needs_model, needs_torch, torch_model  # noqa: F401 (a fixture)

from jaxlamina.weights import open_checkpoint

TASKS = Path(__file__).with_name("data") / "lm_eval"
pytestmark = [
    needs_model,
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("lm_eval") is None,
        reason="lm-eval is not installed: pip install -e '.[lm-eval]'",
    ),
]


@pytest.fixture(scope="module")
def server():
    with serving("--max-model-len", "256", "--max-num-seqs", "4", "--no-warm-up") as found:
        yield found


@pytest.fixture
def lm_eval(server, tmp_path):
    """Runs a task; its results, and the samples in their order."""

    def run(model, task, *options, **arguments):
        kind = "chat/completions" if "chat" in model else "completions"
        given = {"model": NAME, "base_url": f"{server.url}/v1/{kind}"} | arguments
        words = ["--model", model, "--model_args", ",".join(f"{k}={v}" for k, v in given.items())]
        words += ["--tasks", task, "--include_path", ".", "--log_samples", "--output_path", str(tmp_path)]
        done = subprocess.run(
            [sys.executable, "-m", "lm_eval", *words, *options],
            check=False,
            capture_output=True,
            text=True,
            cwd=TASKS,  # the tasks name their data from there
            env=environment(HF_HOME=str(tmp_path / "home"), HF_HUB_OFFLINE="1"),
        )
        assert done.returncode == 0 and "API request failed" not in done.stderr, done.stderr
        [samples] = tmp_path.rglob(f"samples_{task}_*.jsonl")
        [results] = tmp_path.rglob("results_*.json")
        found = [json.loads(line) for line in samples.read_text().splitlines()]
        return json.loads(results.read_text())["results"][task], sorted(found, key=lambda s: s["doc_id"])

    return run


def logprob_of(model, tokenizer, context, continuation):
    """The continuation's, and whether every token of it is the likeliest."""
    import torch

    whole, n = tokenizer.encode(context + continuation), len(tokenizer.encode(context))
    with torch.no_grad():
        rows = torch.log_softmax(model(torch.tensor([whole])).logits[0, n - 1 : -1].float(), dim=-1)
    tokens = torch.tensor(whole[n:])
    return float(rows[torch.arange(len(tokens)), tokens].sum()), bool((rows.argmax(-1) == tokens).all())


# Tokens from this server (its /tokenizer_info and /tokenize), or from the harness's own tokenizer; one
# request at a time, or several prompts in one and several of those at once.
@pytest.mark.parametrize("tokenizer", ["server", "folder"])
@needs_torch
def test_loglikelihoods(lm_eval, torch_model, tokenizer, tmp_path):  # noqa: F811
    ours = open_checkpoint(str(demo_file())).tokenizer()
    more = {}
    if tokenizer == "folder":
        ours.save(tmp_path)
        more = {"tokenizer": str(tmp_path), "tokenizer_backend": "huggingface", "num_concurrent": 2}
    options = ("--batch_size", "3") if more else ()
    results, samples = lm_eval("local-completions", "jaxlamina_capitals", *options, **more)
    n_right, greedy = 0, []
    for sample in samples:
        doc = sample["doc"]
        found = [(float(value), is_greedy == "True") for [(value, is_greedy)] in sample["resps"]]
        expected = [logprob_of(torch_model, ours, doc["question"], f" {choice}") for choice in doc["choices"]]
        assert [x for x, _ in found] == pytest.approx([x for x, _ in expected], abs=1e-3)
        assert [g for _, g in found] == [g for _, g in expected]
        greedy += [g for _, g in found]
        n_right += max(range(2), key=lambda i: expected[i][0]) == doc["answer"]
    assert len(samples) == 4 and set(greedy) == {True, False}
    assert results["acc,none"] == n_right / 4


def test_generated_texts(lm_eval, server):
    _, samples = lm_eval("local-completions", "jaxlamina_counting")
    for sample in samples:
        asked = {"prompt": sample["doc"]["question"], "max_tokens": 12, "temperature": 0}
        [choice] = server.post("/v1/completions", asked | {"stop": ["\n", "."]})["choices"]
        assert sample["resps"] == [[choice["text"]]]
    assert len(samples) == 3


def test_chats(lm_eval, server):
    _, samples = lm_eval(
        "local-chat-completions", "jaxlamina_counting", "--apply_chat_template", eos_string="<|im_end|>"
    )
    for sample in samples:
        asked = {"messages": [{"role": "user", "content": sample["doc"]["question"]}], "temperature": 0}
        asked |= {"max_tokens": 12, "stop": ["\n", "."]}
        [choice] = server.post("/v1/chat/completions", asked)["choices"]
        assert sample["resps"] == [[choice["message"]["content"]]]
    assert "Paris" in samples[0]["resps"][0][0]
