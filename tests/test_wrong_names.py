"""A wrong name is an error before anything heavy is imported."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
from hub_server import ROOT
from serving import environment

NAMES = ("nowhere", "no/where")
COMMANDS = {
    name: (
        ["generate", "hi", "--model", name],
        ["serve", "--model", name, "--port", "0"],
        ["serve", "--model", name, "--load-format", "dummy", "--port", "0"],
        ["chat", "--model", name],
        ["batch", '["a"] [3]', "--model", name],
        ["split", name],
        ["convert", name, "/nowhere/at/all"],
        ["launch", "--dop", "1,1", "--model", name, "--", "generate", "hi"],
        ["launch", "--dop", "1,1", "--", "serve", f"--model={name}"],
        ["launch", "--dop", "1,1", "--set", f"model={name}", "--", "serve"],
        ["bench", "decode", "--model", name],
        ["bench", "prefix", "--model", name],
        ["bench", "overhead", "--model", name],
        ["bench", "throughput", "--model", name],
        ["bench", "throughput", "--config", name],
        ["bench", "step", "--config", name],
        ["bench", "breakdown", "--config", name],
        ["bench", "split", "--config", name],
    )
    for name in NAMES
}
RUN = """
import contextlib, io, json, sys

class NoJax:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("jax", "jaxlib", "torch", "transformers"):
            raise AssertionError(f"{name} is imported")

sys.meta_path.insert(0, NoJax())
from jaxlamina.cli.main import main

for words in json.loads(sys.argv[1]):
    err = io.StringIO()
    with contextlib.redirect_stderr(err):
        code = main(words)
    print(json.dumps([code, err.getvalue()]))
"""


@pytest.mark.parametrize("name", NAMES)
def test_no_command_imports_jax_to_find_out(name: str, tmp_path):
    words = [sys.executable, "-c", RUN, json.dumps(COMMANDS[name])]
    env = environment(HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path), JAXLAMINA_CACHE=str(tmp_path / "cache"))
    done = subprocess.run(
        words, env=env, capture_output=True, text=True, cwd=tmp_path, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    said = [json.loads(line) for line in done.stdout.splitlines()]
    for command, (code, err) in zip(COMMANDS[name], said, strict=True):
        assert code == 2 and err.count("\n") == 1, (command, err)
        assert re.match(
            rf"error: (unknown model|no model shape|random weights need|unknown model) ?.*{name}", err
        ), err


def test_a_rank_that_others_wait_for_looks_before_it_loads_jax(tmp_path):
    script = RUN.replace("from jaxlamina.cli.main import main", "from launch.rank import main")
    words = [["--config", str(tmp_path / "c.toml"), "--rank", "0", "generate", "hi", "--model", "nowhere"]]
    (tmp_path / "c.toml").write_text('dop = "1,1"\n')
    done = subprocess.run(
        [sys.executable, "-c", script, json.dumps(words)],
        env=environment(), capture_output=True, text=True, cwd=ROOT, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    [[code, err]] = [json.loads(line) for line in done.stdout.splitlines()]
    assert code == 2 and err.startswith("error: rank 0 (model worker 0): unknown model 'nowhere'"), err
