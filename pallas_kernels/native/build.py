"""Builds the native kernels' library: `python -m pallas_kernels.native.build`, and on installation.

The kernels are compiled once per instruction set, so one library serves every processor of an architecture.
Needs jaxlib's headers and a C++ compiler: the system's, or the `ziglang` package's. Imports nothing but the
standard library, so that it runs where JAX is not installed.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
LIBRARY = HERE / "libjaxlamina_cpu.so"
# An instruction set to use in place of the best one there is, or "off": nothing is built, nor used.
ENV_VAR = "JAXLAMINA_CPU_KERNELS"
_X86: dict[str, list[str]] = {
    "avx512": ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx2", "-mfma", "-mf16c"],
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    "sse2": [],
}
_INSTRUCTIONS: dict[str, dict[str, list[str]]] = {
    "x86_64": _X86,
    "amd64": _X86,
    "aarch64": {"neon": []},
    "arm64": {"neon": []},
}
_FLAGS = ["-std=c++17", "-O3", "-fPIC", "-ffp-contract=fast", "-fno-math-errno", "-fvisibility=hidden", "-g0"]


class CannotBuild(Exception):
    """Why there is no library, in one line."""


def compiler() -> list[str] | None:
    """The command of a C++ compiler, or None."""
    if os.environ.get("CXX"):
        return os.environ["CXX"].split()
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return [name]
    if importlib.util.find_spec("ziglang"):  # it would compile for this very processor
        return [sys.executable, "-m", "ziglang", "c++", "-mcpu=baseline"]
    return None


def headers() -> Path | None:
    """The folder of XLA's headers, or None."""
    spec = importlib.util.find_spec("jaxlib")
    folder = Path(spec.origin).parent / "include" if spec is not None and spec.origin else None
    return folder if folder is not None and folder.is_dir() else None


def is_current() -> bool:
    """Whether there is a library that is newer than what it is made of."""
    if not LIBRARY.exists():
        return False
    sources = [Path(__file__), *HERE.glob("*.cc"), *HERE.glob("*.h")]
    return LIBRARY.stat().st_mtime > max(source.stat().st_mtime for source in sources)


def build(to: Path = LIBRARY) -> Path:
    """Compiles the library. Raises CannotBuild."""
    command, include = compiler(), headers()
    if command is None:
        raise CannotBuild("no C++ compiler: pip install ziglang, or install g++")
    if include is None:
        raise CannotBuild("jaxlib, whose headers are needed, is not installed")
    with tempfile.TemporaryDirectory() as folder:
        levels = _INSTRUCTIONS.get(platform.machine().lower(), {"portable": []})
        jobs = [
            (source, [*flags, f"-DISA={name}"])
            for source in ("kernel.cc", "product_kernel.cc")
            for name, flags in levels.items()
        ]
        ours = ("attention.cc", "products.cc", "forward.cc")
        jobs += [(source, ["-isystem", str(include)]) for source in ours]

        def compiled(n: int) -> str:
            source, flags = jobs[n]
            out = str(Path(folder) / f"{n}.o")
            _run([*command, *_FLAGS, *flags, "-c", str(HERE / source), "-o", out])
            return out

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(compiled, range(len(jobs))))
        linked = Path(folder) / to.name
        _run([*command, "-shared", "-static-libgcc", "-static-libstdc++", "-s", *objects, "-o", str(linked)])
        # A process that has the old library open keeps it: the new one is another file.
        part = to.with_suffix(".part")
        shutil.copy(linked, part)
        os.replace(part, to)
    return to


def _run(command: list[str]) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line] or [
            done.stderr.strip()[-200:]
        ]
        raise CannotBuild(f"{command[0]} failed: {errors[0]}")


if __name__ == "__main__":
    try:
        print(build())
    except CannotBuild as error:
        sys.exit(f"error: {error}")
