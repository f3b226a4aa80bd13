"""What doctor says of machines that lack things: machines are made by hiding packages, programs and
folders."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxlamina.cli import examine

ROOT = Path(__file__).resolve().parents[1]


def by_name(findings):
    return {f.name: f for f in findings}


@pytest.fixture(scope="module")
def here():
    return by_name(examine.examine())


def test_this_machine_has_what_every_use_needs(here):
    assert not [f for f in here.values() if f.status == "broken"]
    assert "cpu" in here["devices"].detail or "gpu" in here["devices"].detail.lower()
    assert {
        "platform",
        "python",
        "jaxlamina",
        "jax",
        "packages",
        "mpi",
        "mpi4jax",
        "cache",
        "demo model",
        "server",
    } <= set(here)


def test_whatever_is_not_ok_comes_with_what_mends_it(here):
    for f in here.values():
        assert (f.mend is None) == (f.status == "ok"), f


@pytest.mark.parametrize("version", ["0.10.1", "0.13.0", "0.4.38"])
def test_a_jax_that_this_was_not_made_for_is_broken(monkeypatch, version):
    monkeypatch.setattr(examine, "_version", lambda name: version)
    found = examine._jax()
    assert found.status == "broken" and version in found.detail
    assert found.mend == 'pip install "jax>=0.10.2,<0.13"'


@pytest.mark.parametrize("version", ["0.10.2", "0.11.2", "0.12.0", "0.12.1.dev3"])
def test_a_jax_that_this_was_made_for_is_ok(monkeypatch, version):
    monkeypatch.setattr(examine, "_version", lambda name: version)
    assert examine._jax().status == "ok"


def test_missing_packages_are_listed_all_at_once(monkeypatch):
    true_version = examine._version
    monkeypatch.setattr(
        examine, "_version", lambda n: None if n in ("scipy", "flax", "gguf", "uvicorn") else true_version(n)
    )
    packages, gguf, server = examine._packages()
    assert packages.status == "broken" and packages.detail == "not installed: scipy, flax"
    assert gguf.status == "missing" and gguf.mend == "pip install gguf"
    assert server.status == "missing" and server.mend == "pip install uvicorn"


def test_the_cpus_kernels_are_named(monkeypatch):
    monkeypatch.setattr(examine, "_ask", lambda program: ({"instructions": "avx2", "reason": None}, None))
    (found,) = examine._kernels()
    assert (found.status, found.detail) == ("ok", "native, avx2")


def test_without_native_kernels_it_says_why_and_what_builds_them(monkeypatch):
    monkeypatch.setenv("JAXLAMINA_CPU_KERNELS", "off")
    (found,) = examine._kernels()
    assert found.status == "missing" and found.detail.endswith(": JAXLAMINA_CPU_KERNELS=off")
    assert found.mend.endswith("python -m pallas_kernels.native.build")


def test_without_mpi_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(examine.shutil, "which", lambda program: None)
    monkeypatch.setattr(examine, "_importable", lambda module: False)
    mpi, mpi4jax = examine._mpi()
    assert (mpi.status, mpi4jax.status) == ("missing", "missing")
    assert mpi.mend.endswith("apt-get install openmpi-bin libopenmpi-dev")
    assert mpi4jax.mend.endswith("apt-get install libopenmpi-dev && pip install mpi4jax")


def test_a_backend_that_does_not_start_is_broken(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "abacus")
    (devices,) = examine._devices()
    assert devices.status == "broken" and "abacus" in devices.detail


def test_a_question_that_gets_no_answer_in_time(monkeypatch):
    monkeypatch.setattr(examine, "DEADLINE_S", 0.5)
    assert examine._ask("import time; time.sleep(30)") == (None, "no answer within 0.5 s")


def test_cache_and_model_follow_the_environment(monkeypatch, tmp_path):
    from jaxlamina.weights import demo

    monkeypatch.setenv("JAXLAMINA_CACHE", str(tmp_path / "not" / "there" / "yet"))
    monkeypatch.setattr(demo, "_in_wheel", lambda: None)
    cache, model = examine._storage()
    assert cache.status == "ok" and str(tmp_path) in cache.detail
    assert model.status == "missing" and "make demo" in model.mend
    assert not any(tmp_path.iterdir()), "doctor looks without changing anything"


def test_it_works_where_jax_is_not_installed(tmp_path):
    # An interpreter that finds the packages of this one but for JAX.
    hide = tmp_path / "sitecustomize.py"
    hide.write_text(
        "import sys\nclass Hide:\n    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('jax', 'jaxlib'):\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Hide())\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "jaxlamina", "doctor"],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "COLUMNS": "200"},
    )
    assert "Traceback" not in done.stderr
    assert done.returncode == 1
    assert "jax and jaxlib not installed" in done.stdout and 'pip install "jax>=0.10.2,<0.13"' in done.stdout
