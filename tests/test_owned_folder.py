"""Folders that go with their owner, however that ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import jax
import pytest
from serving import ROOT, environment

from jaxlamina.errors import UserError
from jaxlamina.process.cache_folder import make_programs_dir
from jaxlamina.process.jax_cache import keep_programs
from jaxlamina.process.owned_folder import owned_folder

OWNER = """
import sys, time
from pathlib import Path
from jaxlamina.process.owned_folder import owned_folder
with owned_folder(Path(sys.argv[1]), "pipes") as own:
    print(own, flush=True)
    time.sleep(60)
"""


def test_what_a_killed_owner_leaves_is_removed_by_the_next_one(tmp_path):
    how = {"stdout": subprocess.PIPE, "text": True, "cwd": ROOT, "env": environment()}
    with subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path)], **how) as owner:
        left = owner.stdout.readline().strip()
        with owned_folder(tmp_path, "pipes") as own, owned_folder(tmp_path, "others"):
            assert os.path.isdir(left) and own.stat().st_mode & 0o777 == 0o700, "it is not alone"
        assert not own.exists()
        owner.send_signal(signal.SIGKILL)
        owner.wait(10)
    assert os.path.isdir(left)
    with owned_folder(tmp_path, "others"):
        assert os.path.isdir(left), "those of another kind are others'"
    with owned_folder(tmp_path, "pipes"):
        assert not os.path.exists(left)


def test_one_that_begins_just_now_is_left_alone(tmp_path):
    new = tmp_path / f"pipes-{os.getuid()}-new"
    new.mkdir()
    with owned_folder(tmp_path, "pipes"):
        assert new.exists()
    os.utime(new, (1, 1))  # it began long ago, and was killed before it had its lock
    with owned_folder(tmp_path, "pipes"):
        assert not new.exists()


def test_the_same_name_is_waited_for(tmp_path):
    came = threading.Event()

    def second():
        with owned_folder(tmp_path, "kv", "a"):
            came.set()

    with owned_folder(tmp_path, "kv", "a") as one:
        other = threading.Thread(target=second)
        other.start()
        assert not came.wait(0.3) and one.is_dir()
    other.join(10)
    assert came.is_set() and not one.exists()


def test_programs_are_not_taken_from_a_temporary_folder_that_others_may_write_to(
    monkeypatch, tmp_path, caplog
):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for name in ("JAXLAMINA_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / f"jaxlamina-{os.getuid()}"
    assert make_programs_dir() == folder / "xla" and folder.stat().st_mode & 0o777 == 0o700
    for prepare in (
        lambda: folder.chmod(0o777),
        lambda: (folder.rename(tmp_path / "x"), folder.symlink_to("x")),
    ):
        prepare()
        with pytest.raises(UserError, match="is for files of this user, and .*: remove it"):
            make_programs_dir()
    before = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", None)
    try:
        keep_programs()
        assert jax.config.values["jax_compilation_cache_dir"] is None
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    assert "compiled programs are not kept: " in caplog.text
