"""Model folders from strangers: whatever is in the small files is used, or refused in one line, within time
and memory."""

from __future__ import annotations

import json
import re
import signal
import threading
import time

import pytest
from checkpoint_examples import tiny_words_folder

from jaxlamina.cli.main import main
from jaxlamina.errors import UserError
from jaxlamina.models.config import ModelConfig
from jaxlamina.text import template_process
from jaxlamina.text.template_process import render_bounded
from jaxlamina.text.tokenizer import tokenizer_from_folder
from jaxlamina.weights.checkpoint import read_json

DEEP = "[" * 100_000
MESSAGES = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_words_folder(tmp_path_factory.mktemp("tiny"), max_position_embeddings=64)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000 must be at most 1024"),
        ({"num_attention_heads": 10**9, "num_key_value_heads": 10**9}, "num_attention_heads=.* at most 4096"),
        ({"vocab_size": 10**12}, "vocab_size=.* at most"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan must be a finite number"),
        ({"rms_norm_eps": -1e-5}, "rms_norm_eps=-1e-05 must be at least 0"),
        ({"rope_theta": 1e308}, "rope_theta.* at most 1e\\+15"),
        ({"rope_theta": float("inf")}, "rope_theta.* must be a finite number"),
        ({"rope_theta": 10**400}, "rope_theta.* must be a finite number"),
        ({"rope_scaling": {"rope_type": ["linear"], "factor": 2.0}}, "rope_type"),
        ({"rope_scaling": {"rope_type": "linear", "factor": float("nan")}}, "factor=nan must be a finite"),
        ({"eos_token_id": 1e30}, "eos_token_id=1e\\+30 must be a token id"),
        ({"eos_token_id": [1, 1.5]}, "eos_token_id=1.5 must be a token id"),
        ({"eos_token_id": True}, "eos_token_id=True must be a token id"),
        ({"bos_token_id": "x"}, "bos_token_id='x' must be a token id"),
        ({"model_type": ["llama"]}, "model_type"),
    ],
    ids=str,
)
def test_silly_values_of_a_config_are_refused(tiny, change, says):
    hf = json.loads((tiny / "config.json").read_text())
    ModelConfig.from_hf(hf)
    with pytest.raises(UserError, match=says) as error:
        ModelConfig.from_hf(hf | change)
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


def test_layers_of_no_kind_are_refused():
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "vocab_size": 9}
    hf = {"model_type": "qwen2", **sizes, "intermediate_size": 8, "num_key_value_heads": 1}
    for change in (
        {"layer_types": [{}]},
        {"layer_types": 7},
        {"use_sliding_window": True, "max_window_layers": "a"},
    ):
        with pytest.raises(UserError, match=next(reversed(change))):
            ModelConfig.from_hf(hf | change)


def test_damaged_small_files_are_one_line(tiny, tmp_path, capsys):
    (tmp_path / "deep.json").write_text(DEEP)
    with pytest.raises(UserError, match="nested too deeply"):
        read_json(tmp_path / "deep.json")
    assert main(["generate", "x", "--model", str(tmp_path / "nothing")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    for name, content, says in (
        ("tokenizer_config.json", DEEP, "nested too deeply"),
        ("tokenizer_config.json", '{"eos_token": 5}', "eos_token=5 must be a string"),
        ("tokenizer_config.json", '{"eos_token": {"content": []}}', "eos_token=.* must be a string"),
        ("tokenizer_config.json", '{"chat_template": {"a": 1}}', "chat_template must be a string"),
        ("generation_config.json", '{"eos_token_id": "2"}', "eos_token_id='2' must be a token id"),
        ("chat_template.jinja", b"\xff\xfe", "cannot be read"),
        ("tokenizer.json", '{"model": 3}', "is not a tokenizer"),
    ):
        folder = tmp_path / f"{name}-{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        (folder / "tokenizer.json").write_bytes((tiny / "tokenizer.json").read_bytes())
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        with pytest.raises(UserError, match=says) as error:
            tokenizer_from_folder(folder)
        assert "\n" not in str(error.value)


def test_a_pre_tokenizer_that_panics_is_one_line(tiny, tmp_path):
    data = json.loads((tiny / "tokenizer.json").read_text())
    data["pre_tokenizer"] = {
        "type": "Split",
        "pattern": {"Regex": "(x+x+)+y"},
        "behavior": "Isolated",
        "invert": False,
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    tokenizer = tokenizer_from_folder(tmp_path)
    with pytest.raises(UserError, match="tokenizer failed on the prompt"):
        tokenizer.encode("x" * 40_000)


# --- chat templates ---

FOREVER = "{% for i in range(99999) %}{% for j in range(99999) %}{% for k in range(99999) %}{% endfor %}{% endfor %}{% endfor %}"
DOUBLED = "{% set ns = namespace(s='x' * 1000) %}{% for i in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s }}"


def test_templates_are_ended_at_their_bounds_and_the_next_chat_is_fine(monkeypatch):
    """In C as in Jinja's own loops, in time as in memory."""
    for template, says in (
        (DOUBLED, "needs more than"),
        ("{{ 'a' * 10**11 }}", "needs more than|failed"),
        ("{{ 'a'.ljust(10**11) }}", "needs more than|failed"),
        ("{{ '{5}'.format(1) }}", "failed"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "nested too deeply"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "nested too deeply"),
        (
            "{{ messages[0].content }}" * 2 + "{% if messages[0].content == 'x' %}{% endif %}{{ 1 // 0 }}",
            "failed",
        ),
    ):
        with pytest.raises(UserError, match=says) as error:
            render_bounded(template, MESSAGES, {})
        assert "\n" not in str(error.value)
        assert render_bounded("{{ messages[0].content }}{{ x }}", MESSAGES, {"x": 1}) == "Hello1"
    with pytest.raises(UserError, match="thousands|digits|cannot be given"):
        render_bounded("x", MESSAGES, {"x": 10**5000})
    nested: list = []
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(UserError, match="nested too deeply"):
        render_bounded("x", MESSAGES, {"tools": nested})


def test_a_template_that_loops_for_ever_is_ended(monkeypatch):
    monkeypatch.setenv("JAXLAMINA_TEMPLATE_CPU_S", "0.5")
    template_process._process.end()
    began = time.process_time()
    with pytest.raises(UserError, match=re.escape("did not end within 0.5 s")):
        render_bounded(FOREVER, MESSAGES, {})
    assert time.process_time() - began < 1  # it is another process that was at work
    template_process._process.end()


def test_a_chat_goes_on_where_somebody_else_ends_the_process_of_templates():
    """A request that was well until its job ended must not be refused because of the job's end."""
    template = "{{ messages[0].content }}"
    assert render_bounded(template, MESSAGES, {}) == "Hello"
    first = template_process._process._process
    first.send_signal(signal.SIGTERM)  # as all of a rank's processes get it
    assert render_bounded(template, MESSAGES, {}) == "Hello"
    assert template_process._process._process is first
    long = "{% for i in range(99999) %}{% for j in range(40) %}{% endfor %}{% endfor %}" + template
    killed = threading.Timer(0.2, first.kill)
    killed.start()
    assert render_bounded(long, MESSAGES, {}) == "Hello"
    killed.join()
    assert template_process._process._process is not first


def test_a_template_that_ends_its_process_is_an_error(monkeypatch):
    started = template_process._process._started

    def ended():
        wire = started()
        template_process._process._process.kill()
        template_process._process._process.wait()
        return wire

    monkeypatch.setattr(template_process._process, "_started", ended)
    with pytest.raises(UserError, match="ended the process it ran in"):
        render_bounded("x", MESSAGES, {})
