"""What is shipped: the repository's top level, the wheel's contents, and what the Makefile says where Python
is missing."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

import jaxlamina
from jaxlamina.planner import traces
from pallas_kernels.native import build as native

ROOT = Path(__file__).resolve().parents[1]
TOP_LEVEL = {
    *("pyproject.toml", "jaxlamina", "splitter", "pallas_kernels", "launch", "tests", "configs"),
    *("README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile", "docs"),
    *(".ci", ".gitignore", ".pre-commit-config.yaml"),
}
in_a_checkout = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout")


def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@in_a_checkout
def test_the_top_level_is_what_it_should_be():
    listed = subprocess.run(
        ["git", "-c", f"safe.directory={ROOT}", "ls-files"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    files = listed.stdout.splitlines()
    assert {file.split("/")[0] for file in files} == TOP_LEVEL
    assert [file for file in files if file.startswith(".ci/")] == [".ci/run"]


def test_the_version_is_one():
    assert project()["version"] == jaxlamina.__version__


def test_the_base_install_needs_no_mpi_and_no_torch():
    base = {re.split(r"[<>=\[ ]", requirement)[0] for requirement in project()["dependencies"]}
    assert not base & {"mpi4jax", "mpi4py", "torch", "transformers", "fastapi", "gguf"}
    assert set(project()["optional-dependencies"]) == {
        "demo",
        "mpi",
        "server",
        "structured",
        "bench",
        "gpu",
        "dev",
        "lm-eval",
        "test",
        "third-party",
    }


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    pytest.importorskip("hatchling", reason="hatchling builds the wheel: pip install hatchling")
    folder = tmp_path_factory.mktemp("wheel")
    options = ["--no-deps", "--no-build-isolation", "--disable-pip-version-check", "--quiet"]
    command = [sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", str(folder), str(ROOT)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("jaxlamina-*.whl")
    return path


def test_the_wheel_holds_the_four_packages_the_configs_and_the_licence(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert tops == {
        "jaxlamina",
        "splitter",
        "pallas_kernels",
        "launch",
        f"jaxlamina-{jaxlamina.__version__}.dist-info",
    }
    configs = {
        f"jaxlamina/_configs/{p.relative_to(ROOT / 'configs')}" for p in (ROOT / "configs").rglob("*.toml")
    }
    assert configs and configs <= set(names)
    assert any(name.endswith("licenses/LICENSE") for name in names)
    data = {f"jaxlamina/planner/data/{name}" for name in ("README.md", *(f"{t}.npz" for t in traces.NAMES))}
    assert data <= set(names)
    page = ROOT / "jaxlamina" / "server" / "dashboard" / "static"
    assert {f"{path.relative_to(ROOT)}" for path in page.iterdir()} <= set(names)


def test_the_wheel_carries_the_native_kernels_and_says_for_which_platform(wheel):
    """For any Python of it. Without a compiler it is for all platforms, and has none."""
    built = "pallas_kernels/native/libjaxlamina_cpu.so" in zipfile.ZipFile(wheel).namelist()
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    assert wheel.name.endswith(f"-py3-none-{platform if built else 'any'}.whl")
    assert built == (native.compiler() is not None)


def test_the_installed_wheel_finds_its_configs(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\nimport jaxlamina, launch, pallas_kernels, splitter\n"
        "from jaxlamina.models import config_files\n"
        "for module in (jaxlamina, launch, pallas_kernels, splitter): print(module.__file__)\n"
        "print(config_files.configs_dir())\n"
        "assert config_files.model_config('llama-2-70b').num_hidden_layers == 80\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "site")]
    done = subprocess.run(command, check=False, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert all(line.startswith(str(tmp_path / "site")) for line in done.stdout.splitlines()), done.stdout


def test_every_relative_link_in_the_documents_leads_somewhere():
    for document in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
@pytest.mark.parametrize("python", ["/no/such/python", "/bin/false"])
def test_make_without_a_python_says_so_in_one_line(python, tmp_path):
    command = ["make", "demo", f"PYTHON={python}", f"VENV={tmp_path / 'venv'}"]
    done = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    errors = [line for line in done.stderr.splitlines() if not line.startswith(("make:", "make["))]
    assert errors == [f"error: PYTHON={python} is not a Python 3.11 or later"]
