"""Folders for kept KV: whose they are, and who clears them away."""

from __future__ import annotations

import fcntl
import os

import pytest

from jaxlamina.errors import UserError
from jaxlamina.job.cluster import Cluster
from jaxlamina.process import kept_folders
from jaxlamina.process.kept_folders import kept_folder


@pytest.fixture
def held_here(monkeypatch):
    """What a test holds is let go at its end."""
    held = {}
    monkeypatch.setattr(kept_folders, "_held", held)
    yield
    for lock in held.values():
        lock.close()


def test_a_folder_for_kept_kv_is_cleared_away_after_its_supervisor(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxlamina.process.host_memory.SHARED_MEMORY", tmp_path)
    with kept_folder(tmp_path / "journal") as one, kept_folder(None) as two:
        assert one.is_dir() and two.is_dir() and one != two
        assert (one.stat().st_mode & 0o777) == 0o700
        (one / "worker0.kv").write_bytes(b"x")
    assert not one.exists() and not two.exists()
    two.mkdir()
    (two / "lock").touch()  # of one that was killed
    new = tmp_path / f"{two.name}1"
    new.mkdir()  # of one that begins just now
    with kept_folder(tmp_path / "journal") as again:
        assert again == one and not two.exists() and new.exists()


def test_a_rank_holds_its_folder_and_clears_old_ones_away(tmp_path, held_here):
    name = f"jaxlamina-kv-{os.getuid()}-"
    own, left, new, held = (tmp_path / f"{name}{x}" for x in ("own", "left", "new", "held"))
    for folder in (left, new, held):
        folder.mkdir()
        (folder / "lock").touch()
    for folder in (left, held):
        os.utime(folder / "lock", (1, 1))
    with open(held / "lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        kept_folders.hold(own)
    assert [own.exists(), left.exists(), new.exists(), held.exists()] == [True, False, True, True]
    kept_folders.hold(tmp_path / "a user's own")
    assert not (tmp_path / "a user's own").exists()
    assert kept_folders.main(Cluster(kept_kv_folder=str(tmp_path)), 1) == 0 and tmp_path.exists()
    assert kept_folders.main(Cluster(kept_kv_folder=str(own)), 1) == 0 and not own.exists()


def test_a_folder_for_kept_kv_that_is_anothers_is_not_used(tmp_path, held_here):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    own = tmp_path / "jaxlamina-kv-1"
    own.symlink_to(elsewhere)
    with pytest.raises(UserError, match="is another's: remove it"):
        kept_folders.hold(own)
    assert not list(elsewhere.iterdir())
