"""Models of the users' own through `LLM`, the command line and the server: plain Flax of hands that know
nothing of this project (`tests/flax_models`)."""

from __future__ import annotations

import json
import os
import re
from typing import Any

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import openai
import pytest
from flax import nnx
from flax_models import nnx_mha
from plain_models import NAMES, PROMPTS, flax_model, greedy_of_the_function
from serving import ROOT, serving

from jaxlamina import LLM, FlaxModel, SamplingParams
from jaxlamina.cli.main import main
from jaxlamina.errors import UserError
from jaxlamina.models.causal_lm import built
from splitter import SplitError

GREEDY = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)
IN_FLOAT32 = [name for name in NAMES if name != "qk_norm_bf16"]


def tokens_of(llm: LLM, params: SamplingParams = GREEDY) -> list[list[int]]:
    asked = [{"prompt_token_ids": p} for p in PROMPTS]
    return [list(o.outputs[0].token_ids) for o in llm.generate(asked, params)]


# `test_find` cuts them all and runs their slices; here are those that differ in what is kept or carried. Some
# others are in `test_flax_models_ranks`.
FEW = ("complex_rope", "linen_mqa", "moe", "soft_cap_window")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in FEW)) for name in IN_FLOAT32]
)
def test_greedy_tokens_are_the_functions_own(name: str):
    llm = LLM(flax_model(name), max_num_seqs=3, max_model_len=96, check_model=False)
    assert tokens_of(llm) == greedy_of_the_function(name)


# --- What else serving has ---


def test_chunks_prefixes_and_int8_kv():
    """Prompts in chunks between decode steps, and found prefixes: the same tokens. With int8 KV: those of the
    unsplit model with int8 KV."""
    expected = greedy_of_the_function("nnx_einsum_gqa")
    few = LLM(flax_model("nnx_einsum_gqa"), max_num_seqs=3, max_model_len=96, max_num_batched_tokens=8)
    assert tokens_of(few) == expected and tokens_of(few) == expected
    assert few.stats()["n_prefix_hit_tokens"] > 0
    rounded = [
        tokens_of(
            LLM(flax_model("nnx_einsum_gqa"), max_num_seqs=3, max_model_len=96, kv_dtype="int8", split=split)
        )
        for split in (True, False)
    ]
    assert rounded[0] == rounded[1]


def test_bfloat16_weights_stay_as_they_are():
    """Teacher-forced: each token that is written is nearly the likeliest of the function's own logits."""
    model = flax_model("qk_norm_bf16")
    llm = LLM(model, max_num_seqs=3, max_model_len=96)
    assert llm.model.dtype == "bfloat16"
    run, places = jax.jit(model._of_weights), jnp.arange(96)[None]
    for prompt, written in zip(PROMPTS, tokens_of(llm), strict=True):
        n = len(prompt) + len(written)  # behind them the row is filled up, which no token sees
        row = jnp.asarray([[*prompt, *written, *[0] * (96 - n)]], jnp.int32)
        logits = np.asarray(run(model.params, row, places), np.float32)[0, :n]
        said = logits[len(prompt) - 1 : -1]
        behind = said.max(-1) - said[np.arange(len(written)), written]
        assert behind.max() < 0.05 * np.abs(logits).max()


# --- Ways in ---


class Linen(flax.linen.Module):
    """A bag of tokens so far has no attention; a head by hand has."""

    @flax.linen.compact
    def __call__(self, tokens: Any, positions: Any, mask: Any, *, deterministic: bool) -> Any:
        x = flax.linen.Embed(50, 16)(tokens) + jnp.sin(positions)[..., None]
        x = x + flax.linen.MultiHeadDotProductAttention(2, deterministic=deterministic)(x, mask=mask)
        return {"logits": flax.linen.Dense(50)(x)}


def test_from_linen_binds_arguments_and_takes_the_logits_out():
    def mask(tokens: Any, positions: Any) -> Any:
        return flax.linen.make_causal_mask(tokens)

    module, ids = Linen(), jnp.ones((1, 4), jnp.int32)
    variables = module.init(jax.random.key(0), ids, ids, mask(ids, ids), deterministic=True)
    arguments = {"mask": mask, "deterministic": True}
    model = FlaxModel.from_linen(
        module,
        variables,
        arguments=arguments,
        logits=lambda out: out["logits"],
        vocab_size=50,
        max_model_len=64,
    )
    assert model.check() < 1e-5 and len(model.found.sites) == 1
    with pytest.raises(SplitError, match=r"Linen must give logits \[B, T, V\] alone; .* it gives dict"):
        _ = FlaxModel.from_linen(
            module, variables, arguments=arguments, vocab_size=50, max_model_len=64
        ).found


def test_an_argument_that_a_module_needs_is_told():
    class Numbered(nnx.Module):
        def __call__(self, tokens: Any, position_ids: Any, mask: Any = None) -> Any: ...

    says = (
        "Numbered takes position_ids beside tokens: give it by name, for example arguments={'position_ids': "
    )
    with pytest.raises(UserError, match=re.escape(says)):
        FlaxModel.from_nnx(Numbered(), vocab_size=50, max_model_len=64)


def test_no_token_lies_beyond_the_vocabulary():
    """A head padded to a round size, whose padding is likelier than all words."""
    own, params = nnx_mha.build()
    n = nnx_mha.VOCAB_SIZE

    def padded(params: Any, tokens: Any, positions: Any) -> Any:
        return jnp.pad(own(params, tokens, positions), ((0, 0), (0, 0), (0, 70)), constant_values=99.0)

    llm = LLM(FlaxModel(padded, params, vocab_size=n, max_model_len=96), max_num_seqs=2)
    few = LLM(FlaxModel(own, params, vocab_size=n, max_model_len=96), max_num_seqs=2)
    for more in ({}, {"allowed_token_ids": [3, 5]}, {"repetition_penalty": 1.5}):
        asked = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, **more)
        assert tokens_of(llm, asked) == tokens_of(few, asked)


def test_from_nnx_takes_the_module():
    class Dropping(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.embed = nnx.Embed(50, 16, rngs=rngs)
            self.attention = nnx.MultiHeadAttention(2, 16, dropout_rate=0.5, decode=False, rngs=rngs)
            self.drop = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, tokens: Any) -> Any:
            x = self.embed(tokens)
            mask = nnx.make_causal_mask(tokens)
            return self.embed.attend(x + self.drop(self.attention(x, mask=mask)))

    model = FlaxModel.from_nnx(Dropping(nnx.Rngs(0)), vocab_size=50, max_model_len=64)
    assert model.check() < 1e-5 and model.name == "Dropping"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"vocab_size": 1}, "vocab_size=1 must be an integer of at least 2"),
        ({"max_model_len": True}, "max_model_len=True must be an integer"),
        ({"params": {"n": np.arange(3)}}, "params hold no floating-point array"),
        ({"fn": 3}, "first argument must be a function"),
        ({"tokenizer": "/nowhere"}, "must be a folder with a tokenizer.json"),
        ({"eos_token_ids": 2}, "eos_token_ids=2 must be a list of token ids below 50"),
        ({"eos_token_ids": [50]}, "must be a list of token ids below 50"),
    ],
)
def test_wrong_arguments_are_told(arguments: dict[str, Any], says: str):
    fn, params = nnx_mha.build()
    given = {"fn": fn, "params": params, "vocab_size": 50, "max_model_len": 64} | arguments
    with pytest.raises(UserError, match=says):
        FlaxModel(**given)


def test_sizes_of_numpy_and_what_is_no_model_by_itself():
    fn, params = nnx_mha.build()
    model = FlaxModel(
        fn, params, vocab_size=np.int64(50), max_model_len=np.int32(64), eos_token_ids=np.array([3])
    )
    assert (model.vocab_size, model.max_model_len, model.eos_token_ids) == (50, 64, (3,))
    for wrong in (fn, None, nnx.Linear(2, 2, rngs=nnx.Rngs(0))):
        with pytest.raises(UserError, match="is no model by itself: .* FlaxModel.from_nnx"):
            LLM(wrong)


def test_a_model_that_is_not_the_same_cut_is_not_served(monkeypatch: pytest.MonkeyPatch):
    """Experts with a capacity: tokens of a batch push each other out."""
    own, kept = nnx_mha.build()

    def crowded(params: Any, tokens: Any, positions: Any) -> Any:
        logits = own(kept, tokens, positions)
        order = jnp.argsort(tokens, axis=1)  # a token's rank among the row's decides
        return logits * jnp.where(jnp.argsort(order, axis=1) < 5, 1.0, params["late"])[..., None]

    model = FlaxModel(crowded, {"late": jnp.ones(()) / 2}, vocab_size=nnx_mha.VOCAB_SIZE, max_model_len=96)
    with pytest.raises((UserError, SplitError), match="does not give the same when it is cut|mixes tokens"):
        LLM(model, max_num_seqs=2, max_model_len=64)


# --- The command line ---

SOURCES = {
    "raises": ("def build(): raise RuntimeError('no weights')", "cannot be built (RuntimeError: no weights)"),
    "other": ("def build(): return 3", "gives a int: it must return a jaxlamina.FlaxModel"),
    "lacks": ("", "has no attribute 'build'"),
}


@pytest.fixture
def user(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    return tmp_path


@pytest.mark.parametrize("name", SOURCES)
def test_code_that_builds_no_model_is_one_line(user: Any, capsys: Any, name: str):
    source, says = SOURCES[name]
    (user / f"own_{name}.py").write_text(source)
    assert main(["generate", "--model", f"own_{name}:build", "hello"]) == 2
    [line] = capsys.readouterr().err.strip().splitlines()
    assert says in line


def test_a_module_that_is_not_there_is_one_line(user: Any, capsys: Any):
    for words in (["generate", "x"], ["serve"], ["bench", "step"]):
        flag = "--config" if "step" in words else "--model"
        assert main([*words, flag, "no_such_module:build"]) == 2
        [line] = capsys.readouterr().err.strip().splitlines()
        assert "no_such_module" in line


def test_what_cannot_be_cut_is_said_place_by_place(user: Any, capsys: Any):
    (user / "own_refused.py").write_text(
        "from flax_models import refused\nfrom jaxlamina import FlaxModel\n"
        "def build():\n    fn, params = refused.causal_convolution()\n"
        "    return FlaxModel(fn, params, vocab_size=refused.VOCAB_SIZE, max_model_len=refused.MAX_LEN)\n"
    )
    assert main(["split", "own_refused:build"]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 3 and all("refused.py:" in line for line in lines[1:])


def test_generate_without_a_tokenizer_says_how_to_ask_else(capsys: pytest.CaptureFixture[str]):
    assert main(["generate", "--model", "plain_models:nnx_mha", "1 2 3"]) == 2
    assert "generate takes text, and this model has no tokenizer: give it one" in capsys.readouterr().err


def test_split_explains(capsys: Any):
    assert main(["split", "plain_models:soft_cap_window", "--explain"]) == 0
    lines = capsys.readouterr().out.splitlines()
    [first, *_] = (line for line in lines if line.startswith("attention 0 at "))
    assert "soft_cap_window.py:" in first and "causal within 7 tokens" in first and "capped at 5" in first
    assert main(["split", "plain_models:soft_cap_window", "--explain", "--json"]) == 0
    assert [x["window"] for x in json.loads(capsys.readouterr().out)["attention"]] == [7, None, 7]
    assert main(["split", "llama-3-8b", "--explain"]) == 2


def test_bench_step_takes_it(capsys: Any):
    words = ["--case", "2x8", "--local", "--rounds", "1", "--dtype", "float32", "--json"]
    assert main(["bench", "step", "--config", "plain_models:nnx_mha", *words]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["n_layers"] == 2 and max(x["max_difference"] for x in record["results"]) < 1e-4
    assert main(["bench", "step", "--config", "plain_models:nnx_mha", "--layers", "1"]) == 2


# --- The server ---


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n == "hand_softmax" else [pytest.mark.slow]) for n in IN_FLOAT32]
)
def test_a_server_answers_openais_client(name: str):
    variables = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    options = (
        "--model",
        f"plain_models:{name}",
        "--max-model-len",
        "96",
        "--max-num-seqs",
        "4",
        "--no-warm-up",
    )
    with (
        serving(*options, variables=variables) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120) as client,
    ):
        [model] = client.models.list().data
        written = [
            client.completions.create(
                model=model.id, prompt=p, max_tokens=64, temperature=0, extra_body={"return_token_ids": True}
            )
            for p in PROMPTS
        ]
    expected = greedy_of_the_function(name)
    assert [w.choices[0].model_extra["token_ids"] for w in written] == expected


def test_what_a_command_names_is_built_in_this_process():
    model = built("plain_models:nnx_mha")
    assert model.code == "plain_models:nnx_mha" and model.model.origin == {"code": "plain_models:nnx_mha"}
