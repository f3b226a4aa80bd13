"""What this machine has and lacks, as plain findings, each missing thing with the command that mends it.

Looks without changing anything and without the network; what could hang or abort (JAX on a broken driver,
MPI) is asked in a process of its own with a deadline. Works where JAX is missing. Knows nothing of how
findings are shown.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from jaxlamina import __version__
from jaxlamina.process.cache_folder import cache_dir, programs_dir

Status = Literal["ok", "missing", "broken"]
DEADLINE_S = 60
MIN_PYTHON = (3, 11)
JAX_FROM, JAX_BELOW = (0, 10, 2), (0, 13)
BASE_PACKAGES = (
    ("numpy", "numpy"),
    ("scipy", "scipy"),
    ("flax", "flax"),
    ("orbax-checkpoint", "orbax.checkpoint"),
    ("tokenizers", "tokenizers"),
    ("jinja2", "jinja2"),
)
SERVER_PACKAGES = (
    "fastapi",
    "uvicorn",
    "uvloop",
    "httptools",
    "aiohttp",
    "python-multipart",
    "prometheus-client",
)
BASE_MEND = "pip install --upgrade jaxlamina (in a checkout: pip install -e .)"
_ASK_JAX = """
import json, jax
found = [(d.platform, d.device_kind, str(d)) for d in jax.local_devices()]
print(json.dumps([dict(zip(("platform", "kind", "name"), one)) for one in found]))
"""
_ASK_KERNELS = """
import json
from pallas_kernels import cpu
print(json.dumps({"instructions": cpu.instructions(), "reason": cpu.loaded().reason}))
"""
_ASK_MPI = """
import json
from mpi4py import MPI
import mpi4jax
library = MPI.Get_library_version().split(",")[0].strip()
print(json.dumps({"library": library, "cuda": mpi4jax.has_cuda_support()}))
"""


@dataclass(frozen=True)
class Finding:
    """One thing looked at. missing: something optional is not there; broken: nothing works without it."""

    name: str
    status: Status
    detail: str
    mend: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def examine() -> list[Finding]:
    """All findings, in the order in which they are worth reading."""
    return [*_platform(), _jax(), *_packages(), *_devices(), *_kernels(), *_mpi(), *_storage()]


def _platform() -> Iterator[Finding]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Finding(
        "platform",
        "ok",
        f"{platform.system()} {platform.machine()}, {cores} cores, {memory:.1f} GiB of memory",
    )
    ok = sys.version_info >= MIN_PYTHON
    version = f"{platform.python_version()} at {sys.executable}"
    yield Finding("python", *(("ok", version) if ok else ("broken", version, "install Python 3.11 or later")))
    yield Finding("jaxlamina", "ok", f"{__version__} at {Path(__file__).parents[1]}")


def _jax() -> Finding:
    versions = {name: _version(name) for name in ("jax", "jaxlib")}
    wanted = f"jax>={_dotted(JAX_FROM)},<{_dotted(JAX_BELOW)}"
    mend = f'pip install "{wanted}"'
    absent = [name for name, version in versions.items() if version is None or not _importable(name)]
    if absent:
        return Finding("jax", "broken", f"{' and '.join(absent)} not installed", mend)
    detail = f"jax {versions['jax']}, jaxlib {versions['jaxlib']}"
    if not JAX_FROM <= _numbers(versions["jax"] or "") < JAX_BELOW:
        return Finding("jax", "broken", f"{detail}: not a version this was made for", mend)
    return Finding("jax", "ok", detail)


def _packages() -> Iterator[Finding]:
    found, absent = [], []
    for name, module in BASE_PACKAGES:
        version = _version(name)
        if version is None or not _importable(module):
            absent.append(name)
        else:
            found.append(f"{name} {version}")
    if absent:
        yield Finding("packages", "broken", f"not installed: {', '.join(absent)}", BASE_MEND)
    else:
        yield Finding("packages", "ok", ", ".join(found))
    gguf = _version("gguf")
    if gguf is None:
        yield Finding("gguf", "missing", "needed to read .gguf files and the demo model", "pip install gguf")
    else:
        yield Finding("gguf", "ok", f"gguf {gguf}")
    absent = [name for name in SERVER_PACKAGES if _version(name) is None]
    if absent:
        detail = f"not installed: {', '.join(absent)}; needed by serve, and by chat and batch without --url"
        yield Finding("server", "missing", detail, f"pip install {' '.join(absent)}")
    else:
        yield Finding("server", "ok", ", ".join(f"{name} {_version(name)}" for name in SERVER_PACKAGES))


def jax_devices() -> tuple[list[dict[str, str]] | None, str]:
    """What JAX finds here, each device's platform, kind and name; None and why, where JAX cannot start."""
    if not _importable("jax"):
        return None, "jax is not installed"
    return _ask(_ASK_JAX)


def _devices() -> Iterator[Finding]:
    if not _importable("jax"):
        return
    devices, trouble = jax_devices()
    if devices is None:
        yield Finding(
            "devices", "broken", f"JAX cannot start: {trouble}", "unset JAX_PLATFORMS, or mend the driver"
        )
        return
    kinds: dict[str, int] = {}
    for device in devices:
        kinds[f"{device['platform']} ({device['kind']})"] = (
            kinds.get(f"{device['platform']} ({device['kind']})", 0) + 1
        )
    detail = ", ".join(f"{n} × {kind}" for kind, n in kinds.items())
    yield Finding("devices", "ok", detail)
    has_gpu = any(device["platform"] in ("gpu", "cuda", "rocm") for device in devices)
    if not has_gpu and Path("/dev/nvidiactl").exists():
        yield Finding(
            "gpu",
            "missing",
            "an NVIDIA driver is here, but JAX sees no GPU",
            'pip install "jax[cuda13]>=0.10.2,<0.13"',
        )


def _kernels() -> Iterator[Finding]:
    """What computes attention on this machine's CPU."""
    if not _importable("jax"):
        return
    found, trouble = _ask(_ASK_KERNELS)
    if found is not None and found["instructions"] is not None:
        yield Finding("cpu kernels", "ok", f"native, {found['instructions']}")
        return
    why = trouble if found is None else found["reason"]
    mend = "pip install ziglang (or install g++), then python -m pallas_kernels.native.build"
    yield Finding("cpu kernels", "missing", f"XLA computes attention on the CPU: {why}", mend)


def _mpi() -> Iterator[Finding]:
    """MPI runs the two pools as ranks; one process does without."""
    mpirun = shutil.which("mpirun")
    if mpirun is None:
        yield Finding("mpi", "missing", "no mpirun", _apt("openmpi-bin libopenmpi-dev"))
    else:
        told = _output([mpirun, "--version"]).splitlines()
        version = told[0].strip() if told else "does not tell its version"
        cuda = "mpi_built_with_cuda_support:value:true" in _output(["ompi_info", "--parsable", "--all"])
        yield Finding("mpi", "ok", f"{version} at {mpirun}, {'' if cuda else 'not '}CUDA-aware")
    if not _importable("mpi4jax"):
        headers = shutil.which("mpicc") is not None
        mend = "pip install mpi4jax" if headers else f"{_apt('libopenmpi-dev')} && pip install mpi4jax"
        yield Finding("mpi4jax", "missing", "not installed", mend)
        return
    told_mpi, trouble = _ask(_ASK_MPI)
    installed = _version("mpi4jax")
    if told_mpi is None:
        again = "pip install --force-reinstall --no-cache-dir --no-deps mpi4jax"
        yield Finding("mpi4jax", "missing", f"{installed} does not load: {trouble}", again)
    else:
        gpu = "with" if told_mpi["cuda"] else "without"
        yield Finding("mpi4jax", "ok", f"{installed} on {told_mpi['library']}, {gpu} GPU support")


def _storage() -> Iterator[Finding]:
    try:
        from jaxlamina.model_files import demo
    except ImportError as error:
        yield Finding("cache", "missing", f"not looked at: {error}", BASE_MEND)
        return
    folder = cache_dir()
    nearest = next(p for p in (folder, *folder.parents) if p.exists())
    if not os.access(nearest, os.W_OK):
        mend = "export JAXLAMINA_CACHE=/a/folder/that/can/be/written"
        yield Finding("cache", "missing", f"{folder} cannot be written", mend)
    else:
        programs = len(list(programs_dir().glob("*-cache"))) if programs_dir().is_dir() else 0
        free = shutil.disk_usage(nearest).free / 2**30
        yield Finding("cache", "ok", f"{folder}, {programs} compiled programs, {free:.0f} GiB free")
    path = demo.present()
    if path is None:
        mend = "make demo, or any use of smollm2-135m-instruct, fetches it (98 MB)"
        yield Finding("demo model", "missing", "smollm2-135m-instruct is not here yet", mend)
    else:
        yield Finding("demo model", "ok", str(path))


def _ask(program: str) -> tuple[Any, str]:
    """What a Python program prints as JSON, or None and the last line of its complaint."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )
    except subprocess.TimeoutExpired:
        return None, f"no answer within {DEADLINE_S} s"
    if done.returncode == 0 and done.stdout.strip():
        return json.loads(done.stdout.splitlines()[-1]), ""
    complaint = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    return None, complaint[-1] if complaint else f"exit code {done.returncode}"


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _apt(packages: str) -> str:
    return f"{'' if os.geteuid() == 0 else 'sudo '}apt-get install {packages}"


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the parent of a submodule
        return False


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    """Leading numbers of a version: "0.12.0.dev1" → (0, 12, 0)."""
    parts = []
    for part in version.split("."):
        if not part.isdecimal():
            break
        parts.append(int(part))
    return tuple(parts)


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
