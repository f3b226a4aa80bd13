"""Options of all commands: one name and one meaning each, names that can be read at any width, errors that
name them."""

from __future__ import annotations

import inspect
import math
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import typer

from jaxlamina import LLM
from jaxlamina.cli.main import app, main
from jaxlamina.cli.model_options import CommandOptions
from jaxlamina.console.command import OLD_NAMES, as_options
from jaxlamina.errors import UserError
from jaxlamina.job.cluster import Cluster
from jaxlamina.options import EngineOptions, LLMOptions, ModelOptions, Options, option, table
from jaxlamina.options import definitions as definitions_of

ROOT = Path(__file__).resolve().parents[1]
WRITERS = ("generate", "serve", "chat", "batch")
# What differs where the option is the same: (name, part) -> why.
BY_COMMAND = {
    "--max-tokens": "a chat's answer may be as long as there is room, other texts have a usual length",
    "--temperature": "a chat leaves it to the server",
    "--chat": "generate asks the model's template, batch is told",
    "--system": "only generate can be without a template",
    "--seed": "of one request, of a server's requests, of a bench's lengths",
    "--json": "what is written as JSON is the command's",
    "--model": "bench throughput has --config instead, bench serve asks the server",
    "--api-key": "a server has one, a client gives it; benches take OpenAI's variable, too",
    "--host": "where to listen, where to connect",
    "--port": "where to listen, where to connect",
    "--url": "scale changes a server that runs, batch can do without one",
    "--prefill": "tokens of a bench's prompt, or workers more",
    "--timeout": "for an answer's next bytes, for a job to be ready",
    "--dtype": "benches of shapes have bfloat16, convert and split a dtype of their own",
    "--max-num-batched-tokens": "bench throughput gives its peers the same number",
    "--max-model-len": "bench throughput draws no longer requests",
    "--config": "a cluster, or a model's shape",
    "--layers": "counts to go through, or one",
    "--batch": "requests of a step, or sizes to go through",
    "--case": "shapes of a bench's cases",
    "--rounds": "how often a bench repeats",
    "--num-prompts": "as many as the bench needs",
    "--dataset-name": "what a bench can draw",
    "--local-attention": "one share, or several to compare",
    "--request-rate": "one, or several to go through",
    "--input-len": "as long as the bench needs",
    "--output-len": "as long as the bench needs: bench recovery's streams outlast a fault",
    "--streams": "beside what is measured, or what is measured",
    "--deadline": "for a first answer, or for whatever bench recovery waits for",
    "--profile-s": "of a server in between, or of a bench that runs as long",
    "--ignore-eos": "bench serve asks a server for it",
    "--peers": "peers of the bench",
    "--steady": "bench lamina measures full batches unless told otherwise, bench throughput where asked",
    "--steps": "of a figure, or of a recording",
    "--out": "what a bench writes: a device's calibration, or the package's own, fitted anew",
    "--calibration": "what measured steps are compared with, or what is planned with",
    "--with-prefill": "what a plan counts, or what a bench computes",
    "--devices": "of a bench's process, or what there is to plan for",
    "--compute": "of a plan it may be left out",
    "--as-run": "simulate is of what runs here, plan of what could",
    "--dop": "of a job, of several to compare, or 1,0 of a simulated unsplit model",
    "--tensor-parallel": "of a process's devices, or of simulated model workers",
    "--batches": "of a drawn schedule, or of a simulated setup, which has one unless it says more",
    "--local-share": "of a drawn schedule's attention, or of a simulated setup's KV",
    "--partition": "a simulated setup says what auto stands for",
    "--figure": "of what was measured, or of what formulas give",
    "--max-num-seqs": "of bench lamina's ways, whose copies share it out",
    "--kv-slots": "of bench lamina's ways, whose copies share it out",
}


def commands(group: Any = None, name: str = "") -> dict[str, Any]:
    """Every command by how it is called."""
    found = {}
    group = group or typer.main.get_command(app)
    for word, command in group.commands.items():
        if hasattr(command, "commands"):
            found |= commands(command, f"{name}{word} ")
        else:
            found[name + word] = command
    return found


def options(command: Any) -> dict[str, Any]:
    return {p.opts[0]: p for p in command.params if p.opts[0].startswith("--") and p.name != "help"}


ALL = {name: options(command) for name, command in commands().items()}
SHARED = sorted({o for of in ALL.values() for o in of if sum(o in other for other in ALL.values()) > 1})


def test_there_are_many_commands_and_options():
    assert len(ALL) > 15 and {"generate", "bench serve"} <= ALL.keys() and len(SHARED) > 20


def definitions(name):
    """How an option is defined in the commands that have it, but `launch`, whose default is the cluster's
    file."""
    parts = ("multiple", "is_flag", "secondary_opts", "default", "help", "metavar", "min", "max")
    having = {command: of[name] for command, of in ALL.items() if name in of and command != "launch"}
    return {repr([getattr(p, part, None) for part in parts]): command for command, p in having.items()}


@pytest.mark.parametrize("name", SHARED)
def test_an_option_of_several_commands_is_one_option(name):
    differs = len(definitions(name)) > 1
    assert differs == (name in BY_COMMAND), definitions(name)


def test_whole_numbers_of_benches_have_a_least_one(capsys):
    bounds = {
        (name, flag): p.min
        for name, of in ALL.items()
        for flag, p in of.items()
        if name.startswith("bench ") and p.type_descriptor.annotation is int
    }
    assert len(bounds) > 30 and [option for option, least in bounds.items() if least is None] == []
    for words in (["kernels", "--seed", "-1"], ["serve", "--num-prompts", "99999999999999"]):
        assert main(["bench", *words]) == 2
        assert f"Invalid value for '{words[1]}'" in capsys.readouterr().err


def test_whoever_writes_with_a_model_has_all_of_its_options():
    for command in WRITERS:
        names = {param.name for param in ALL[command].values()}
        assert names >= definitions_of(CommandOptions).keys(), command


def test_what_llm_takes_is_an_option_too():
    from jaxlamina import LLM

    parameters = inspect.signature(LLM.__init__).parameters
    in_python_only = {
        *("devices", "compilation_cache", "calibration_headroom", "use_tqdm_on_load", "on_load"),
        *("group", "recording"),  # said by the command
    }
    of_command = CommandOptions().of_llm(default_seqs=32)
    assert set(parameters) - in_python_only - {"self", "model"} == of_command.keys()
    for name, value in of_command.items():
        usual = {"max_num_seqs": 32, "scheduling_policy": "fifo"}.get(name)
        assert value == parameters[name].default or value == usual, name
    for name, definition in definitions_of(LLMOptions).items():
        assert f"``{name}``: {definition.option.help}" in LLM.__doc__


@pytest.mark.parametrize("columns", ["40", "80"])
@pytest.mark.parametrize("name", ALL)
def test_help_shows_every_name_whole_in_a_pipe(capsys, monkeypatch, name, columns):
    monkeypatch.setenv("COLUMNS", columns)
    assert main([*name.split(), "--help"]) == 0
    text = capsys.readouterr().out
    words = set(re.split(r"[\s,]+", text))
    for flag, param in ALL[name].items():
        shown = {flag, *param.secondary_opts}
        assert param.hidden or shown <= words, shown - words
    assert all(len(line) <= max(80, int(columns)) for line in text.splitlines())


@pytest.mark.parametrize(("old", "new"), OLD_NAMES.items())
def test_an_old_name_is_taken_and_not_shown(capsys, monkeypatch, old, new):
    having = [
        name
        for name, of in ALL.items()
        if new in {o for p in of.values() for o in (*p.opts, *p.secondary_opts)}
    ]
    assert having
    for name in having:
        command = commands()[name]
        given = [old] if ALL[name].get(new) is None or ALL[name][new].is_flag else [f"{old}=7"]
        arguments = ["x"] if name in ("generate", "batch") else []
        values = command.make_context(name, [*arguments, *given]).params
        field = next(p.name for p in command.params if new in (*p.opts, *p.secondary_opts))
        assert values[field] == (7 if "=" in given[0] else not new.startswith("--no-"))
        main([*name.split(), "--help"])
        assert f" {old} " not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (
            "max_tokens=0 must be at least 1 or None (up to the model's length)",
            "--max-tokens 0 must be at least 1",
        ),
        ("dtype='int3' must be one of", "--dtype int3 must be one of"),
        ("leave out split=False", "leave out --no-split"),
        ("n=2, best_of=None with temperature=0", "--n 2, no --best-of with --temperature 0"),
        ("or partition='tokens' or partition='requests'", "or --partition tokens or --partition requests"),
        ("raise max_model_len if", "raise --max-model-len if"),
        ("the model has no dtype, n or stop", "the model has no dtype, n or stop"),
        ("unknown key 'n=2' in /tmp/n=2 and b.n=2", "unknown key 'n=2' in /tmp/n=2 and b.n=2"),
        ("stop_token_ids=[1, 2] must", "--stop-token-id [1, 2] must"),
    ],
)
def test_errors_name_options(text, wanted):
    assert as_options(text, app, ["generate", "hi"]) == wanted
    assert as_options(text, app, ["launch"]) == text == as_options(text, app, [])


@pytest.mark.parametrize(
    ("words", "text", "wanted"),
    [
        (["serve"], "lower max_model_len or give kv_slots", "lower --max-model-len or give --kv-slots"),
        (["serve", "--kv-slots", "3"], "kv_slots=3 take", "--kv-slots 3 take"),
        (["serve"], "dtype='x' must; the dtype of", "--dtype x must; the dtype of"),
        (["serve"], "give prompt_token_ids", "give prompt_token_ids"),
        (["serve"], "lower --max-model-len", "lower --max-model-len"),
        (["bench", "throughput"], "kv_slots=3", "--kv-slots 3"),
        (
            ["generate"],
            "n=2, best_of=None with temperature=0: or use_beam_search=True",
            "--n 2, no --best-of with --temperature 0: or --use-beam-search",
        ),
        (["launch", "--dop", "1,1"], "c.toml: partition='x' must", "c.toml: partition='x' must"),
        (["split"], "kv_slots=3, /tmp/model_x/batch=3", "kv_slots=3, /tmp/model_x/batch=3"),
    ],
)
def test_errors_name_the_commands_own_options(words, text, wanted):
    assert as_options(text, app, words) == wanted


# --- definitions ---


@dataclass(frozen=True)
class Some(Options):
    size: int | Literal["auto"] = option("auto", "How many.", least=1, most=9)
    share: float = option(0.5, "Of all.", least=0, most=1, above=True)
    word: Literal["one", "two"] = option("one", "Which.")
    name: str | None = option(None, "Whose.", choices=("mine", "yours"))
    plain: int = 3


@pytest.mark.parametrize(
    ("given", "wrong"),
    [
        ({"size": 0}, "size=0 must be at least 1, and 9 at most"),
        ({"size": "some"}, "size='some' must be a whole number"),
        ({"size": True}, "size=True must be a whole number"),
        ({"size": None}, "size=None must be a whole number"),
        ({"share": 0}, "share=0.0 must be above 0, and 1 at most"),
        ({"share": math.nan}, "share=nan must be above 0"),
        ({"word": "three"}, "word='three' must be one of one, two"),
        ({"name": "ours"}, "name='ours' must be one of mine, yours"),
    ],
)
def test_a_value_is_held_to_its_definition(given, wrong):
    with pytest.raises(UserError, match=f"^{re.escape(wrong)}"):
        Some(**given)


def test_what_is_allowed_is_taken_as_it_is():
    found = Some(size=np.int64(4), share=1, name=None)
    assert (found.size, found.share, type(found.share), found.plain) == (4, 1.0, float, 3)
    assert list(definitions_of(Some)) == ["size", "share", "word", "name"]


def test_llm_says_which_option_was_meant():
    with pytest.raises(
        TypeError, match="LLM has no option 'enable_prefix_caching', there is 'prefix_caching': help"
    ):
        LLM("no model is looked for", enable_prefix_caching=False)
    with pytest.raises(TypeError, match="LLM has no option 'zzz': help"):
        LLM("no model is looked for", zzz=1)


def test_the_cluster_file_has_the_options_of_models_and_the_docs_say_all():
    """Once: in the table that the definitions make."""
    assert (
        definitions_of(Cluster).keys()
        > definitions_of(ModelOptions).keys()
        > definitions_of(EngineOptions).keys()
    )
    lines = (ROOT / "docs" / "launch.md").read_text().splitlines()
    at = lines.index("| key | default | |")
    assert lines[at : at + len(list(table(Cluster)))] == list(table(Cluster))


def test_a_new_option_is_one_definition(tmp_path):
    """Added to a copy of the package in one line: of `LLM`, of commands, of the cluster file, and handed on
    by launch."""
    for package in ("jaxlamina", "splitter", "pallas_kernels", "launch"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    path = tmp_path / "jaxlamina" / "options.py"
    anchor = '    kv_manager: Literal["token", "padded"] = option('
    added = '    patience: int = option(3, "Steps that it waits.", least=1)\n'
    text = path.read_text()
    assert text.count(anchor) == 1
    path.write_text(text.replace(anchor, added + anchor))
    code = """
import inspect
from jaxlamina import LLM
from jaxlamina.cli.launch import _context
from jaxlamina.cli.main import main
from jaxlamina.job.cluster import Cluster
assert inspect.signature(LLM.__init__).parameters["patience"].default == 3
assert "``patience``: Steps that it waits." in LLM.__doc__
cluster = Cluster.load(None, {"patience": 5})
assert cluster.patience == 5
for command, wanted in ((["serve"], 5), (["generate", "x", "--patience", "7"], 7)):
    assert _context(command, cluster).params["patience"] == wanted
main(["generate", "--help"])
assert main(["serve", "--patience", "0"]) == 2
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
                         env={**os.environ, "PYTHONPATH": str(tmp_path)})  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert "--patience" in run.stdout and "Steps that it waits." in run.stdout
