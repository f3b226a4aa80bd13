"""Keys of requests: several, and others while the server runs."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys

import pytest
from checkpoint_examples import tiny_words_folder
from serving import ROOT, environment
from supervised import Supervised

from jaxlamina.errors import UserError
from jaxlamina.server.api_keys import ApiKeys


def write(path, text):
    """As a secret is changed by most: another file in its place."""
    new = path.with_suffix(".new")
    new.write_text(text)
    os.replace(new, path)


def test_one_key_or_none():
    assert not ApiKeys(None, None).are_needed
    keys = ApiKeys("one", None)
    assert keys.are_needed and keys.has(b"one")
    assert not any(keys.has(key) for key in (b"", b"on", b"one ", b"\xff"))


def test_keys_of_a_file_change_while_it_is_used(tmp_path):
    path = tmp_path / "keys"
    write(path, "# ours\none\n\n  two  \n")
    keys = ApiKeys(None, path)
    assert keys.has(b"one") and keys.has(b"two") and not keys.has(b"# ours") and not keys.has(b"")
    write(path, "two\nthree\n")
    assert keys.has(b"three") and keys.has(b"two") and not keys.has(b"one")


def test_what_cannot_be_read_changes_nothing(tmp_path, caplog):
    path = tmp_path / "keys"
    write(path, "one\n")
    keys = ApiKeys(None, path)
    for text in ("", "# none\n", None):
        if text is None:
            path.unlink()
        else:
            write(path, text)
        assert keys.are_needed and keys.has(b"one") and not keys.has(b"")
    write(path, "two\n")
    assert keys.has(b"two") and not keys.has(b"one")


@pytest.mark.parametrize(
    ("text", "says"), [(None, "No such file"), ("# no\n", "has no key"), ("x" * 2**21, "more than")]
)
def test_a_file_without_keys_is_refused(text, says, tmp_path):
    path = tmp_path / "keys"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=says):
        ApiKeys(None, path)
    words = [sys.executable, "-m", "jaxlamina", "serve", "--api-key-file", str(path)]
    done = subprocess.run(
        words, check=False, capture_output=True, text=True, cwd=ROOT, env=environment(), timeout=60
    )
    assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr


def test_two_ways_to_say_it_are_refused(tmp_path):
    with pytest.raises(UserError, match="leave one out"):
        ApiKeys("one", tmp_path / "keys")


def test_a_supervised_server_takes_new_keys(tmp_path):
    path = tmp_path / "keys"
    write(path, "one\n")
    tiny = tiny_words_folder(tmp_path, max_position_embeddings=512)
    body = {"prompt": "w1 w2", "max_tokens": 3, "temperature": 0}

    def statuses(server, key):
        headers = {"Authorization": f"Bearer {key}"}
        asked = [
            ("POST", "/v1/completions", body),
            ("GET", "/v1/models", None),
            ("POST", "/tokenize", {"prompt": "w1"}),
        ]
        return [server.request(*one, headers)[0] for one in asked]

    with contextlib.closing(Supervised.of([], tiny, ["--api-key-file", str(path)])) as server:
        assert statuses(server, "one") == [200, 200, 200] and statuses(server, "two") == [401, 401, 200]
        write(path, "two\n")
        assert statuses(server, "one") == [401, 401, 200] and statuses(server, "two") == [200, 200, 200]
        # The job's own way in is the supervisor's alone.
        forged = {"X-JaxLamina-Supervisor": "x"}
        assert server.request("GET", "/v1/models", None, forged)[0] == 401
