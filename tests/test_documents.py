"""README and docs: every command and Python block runs as written, and every command that is shown has the
options it shows."""

from __future__ import annotations

import re
import shlex
import shutil
import socket
import subprocess
import sys
import tomllib
from typing import Any

import pytest
import typer
from documents import ROOT, RUN, Block, blocks
from serving import environment

from jaxlamina.cli.main import app
from jaxlamina.weights import demo
from launch.options import parse

PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))),
]
BLOCKS = [block for page in PAGES for block in blocks(page)]
RUNS = [page for page in PAGES if any(b.page == page and b.language in RUN and not b.why_not for b in BLOCKS)]
# Half a minute of a core or more each, and they hold little that README has not. The one block of reliability.md that
# runs starts what test_faults and test_supervisor start.
SLOW = ("docs/launch.md", "docs/serving.md", "docs/reliability.md")
# Compiled as a user's programs are. The others are compiled as this run's tests are, whose programs they find
# in its cache.
FOR_USERS = "README.md"
TIMEOUT_S = 900


def id_of(block: Block) -> str:
    return f"{block.page}:{block.line}"


def jaxlamina(folder: Any) -> str:
    """A folder with this tree's `jaxlamina`, as an activated environment has it."""
    folder.mkdir()
    script = folder / "jaxlamina"
    script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m jaxlamina "$@"\n')
    script.chmod(0o755)
    (folder / "python").symlink_to(sys.executable)
    return str(folder)


def own_network() -> list[str]:
    """Words before a command that give it a network of its own, where nobody has port 8000; none where there
    can be none."""
    words = ["unshare", "--map-root-user", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    if (
        shutil.which("unshare")
        and not subprocess.run([*words, "true"], check=False, capture_output=True).returncode
    ):
        return words
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", 8000)), "the pages' servers need port 8000, which somebody has"
    return []


@pytest.mark.skipif(
    demo.present() is None or shutil.which("curl") is None, reason="needs the demo model (make demo) and curl"
)
@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize("page", [pytest.param(p, marks=[pytest.mark.slow] * (p in SLOW)) for p in RUNS])
def test_every_block_of_a_page_runs_as_written(page, tmp_path):
    path = f"{jaxlamina(tmp_path / 'bin')}:{environment()['PATH']}"
    variables = environment(
        PATH=path, JAXLAMINA_CACHE=str(tmp_path / "cache"), COLUMNS="80", no_proxy="localhost,127.0.0.1"
    )
    if page == FOR_USERS:
        variables.pop("XLA_FLAGS", None)
    here = tmp_path / "here"
    here.mkdir()
    for name in ("configs", "launch"):  # a user is in the repository
        (here / name).symlink_to(ROOT / name)
    words = [*own_network(), sys.executable, str(ROOT / "tests/documents.py"), page, str(here)]
    done = subprocess.run(
        words, check=False, capture_output=True, text=True, cwd=ROOT, env=variables, timeout=TIMEOUT_S
    )
    print(done.stdout)
    assert done.returncode == 0, done.stderr


def test_few_blocks_are_not_run_and_each_says_why():
    marked = [b for b in BLOCKS if b.language in RUN and b.why_not]
    assert len([b for b in marked if b.page == "README.md"]) <= 5
    assert all(len(b.why_not) > len("not run: ") for b in marked)
    assert {b.language for b in BLOCKS} <= {*RUN, ""}  # anything else: shall it be run?
    assert len(BLOCKS) - len(marked) > 12 and "README.md" in RUNS


def shown_commands() -> list[tuple[str, str]]:
    """Every `jaxlamina …` and `python -m launch …` in a block or in the text, that is more than a command's
    name."""
    found = [(id_of(b), command) for b in BLOCKS for command in b.commands]
    for page in PAGES:
        text = re.sub(r"^```.*?^```$", "", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
        found += [(page, words) for words in re.findall(r"`(jaxlamina [^`]*)`", text)]
    return [(where, words) for where, words in found if re.search(r"\bjaxlamina \w|-m launch", words)]


def words_of(command: str) -> list[str]:
    return shlex.split(re.sub(r"\s[&|>].*", "", command.replace("…", "x")))


@pytest.mark.parametrize(("where", "command"), shown_commands())
def test_a_command_that_is_shown_has_the_options_it_is_shown_with(where, command):
    words = words_of(command)
    if "launch" in words and "-m" in words:
        parse("python -m launch", "", words[words.index("launch") + 1 :])
        return
    check_options(words[words.index("jaxlamina") + 1 :], where)


def check_options(words: list[str], where: str) -> None:
    if words[0] == "launch":
        if "--" not in words:
            return  # no more than its name, and "…"
        words = words[words.index("--") + 1 :]
        if words == ["x"]:
            return
    if (
        words[:2] in (["bench", "start"], ["bench", "recovery"]) and "--" in words
    ):  # what it starts is a command, too
        at = words.index("--")
        check_options(words[at + 1 :], where)
        words = words[:at]
    current: Any = typer.main.get_command(app)
    context, name = None, "jaxlamina"
    while hasattr(current, "commands"):
        context = current.make_context(name, list(words), parent=context)
        if not words:
            return
        name, current, words = current.resolve_command(context, words)
    known = {"--help"} | {option for p in current.params for option in (*p.opts, *p.secondary_opts)}
    assert {word.partition("=")[0] for word in words if re.match(r"--\w", word)} <= known, where


def test_make_targets_and_extras_that_are_shown_are_there():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"].keys()
    shown = "".join((ROOT / page).read_text() for page in PAGES)
    assert set(re.findall(r"^make ([\w-]+)", shown, re.MULTILINE)) | {"demo", "test"} <= targets
    found = {
        extra
        for names in re.findall(r"pip install -e '\.\[([\w,-]+)\]'", shown)
        for extra in names.split(",")
    }
    assert found and found <= extras
    listed = re.search(r"# extras: ([\w, -]+)", shown)
    assert listed and set(listed[1].split(", ")) == extras
