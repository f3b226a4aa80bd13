"""Compiled programs on disk, under names that say what they are made of, so that a start need not trace what
it would find compiled.

JAX's own cache (`compilation`) knows a program by what it was lowered to, so a model has to be traced to look
there: a second of Python for 32 layers, and nothing else to do (docs/findings.md). Here a program is known by
all that its trace depends on: the sources of this project's packages, versions, flags, the device, and what
the caller says. Knows no model and no rank.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import platform
import secrets
import shutil
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable

from jaxlamina.process.turns import between_parts
from pallas_kernels import compat, cpu
from pallas_kernels.dispatch import candidates, forced_backend

_log = logging.getLogger("jaxlamina")
_PACKAGES = ("jaxlamina", "splitter", "pallas_kernels")
# Others whose code is traced, or compiles.
_LIBRARIES = ("jax", "jaxlib", "flax", "numpy")
# Settings of JAX that say where things are, and not what a program is.
_OF_PLACES = ("cache_dir", "address", "coordinator", "dump", "log", "profiler", "process_id")
# Folders of programs of other sources or versions that are left.
_FOLDERS_LEFT = 4
MOST_BYTES = 4 * 2**30
"""Of programs of one version. One is a few hundred kilobytes, or some megabytes on a GPU."""
_NEW, _WRITTEN_S = "new-", 600.0  # how files are called while they are written, which takes no longer


def folder() -> Path | None:
    """Beside JAX's own programs; None where those are not kept, or in no folder of this host (``gs://…``)."""
    chosen = jax.config.values["jax_compilation_cache_dir"]
    is_on = chosen is not None and jax.config.values["jax_enable_compilation_cache"]
    return Path(chosen) / "whole" if is_on and "://" not in str(chosen) else None


def name_of(device: jax.Device, *what: object) -> str | None:
    """The name of a program for ``device``. ``what``: all that it depends on beside this project's sources,
    versions, flags and the device, each of which has the same ``repr`` in another process. None where
    programs are not kept, or where one of ``what`` says where it lies in memory."""
    text = repr(what)
    if folder() is None or " at 0x" in text:
        return None
    native = cpu.serves(device.platform)
    # A program names its devices, which are called by rank where XLA knows all of a job's.
    kind = device.device_kind, device.id, _processor() if device.platform == "cpu" else ""
    digest = _digest(kind, _settings(), forced_backend(), native, text)
    return f"{_made_by(device.client.platform_version)}/{digest}"


def kinds(tree: Any) -> Any:
    """Arrays, or shapes, as a name has them."""
    return jax.tree.map(lambda x: (x.shape, str(x.dtype)), tree)


_here = threading.local()


@cache
def _listen() -> None:
    def heard(event: str, **_: Any) -> None:
        if event.startswith("/jax/compilation_cache/"):
            _here.heard = {*getattr(_here, "heard", ()), event.rpartition("/")[2]}

    jax.monitoring.register_event_listener(heard)


def compiled(
    lowered: jax.stages.Lowered, device: jax.Device, options: Any
) -> tuple[jax.stages.Compiled, bool]:
    """The program, and whether `save` can keep it: XLA for CPUs cannot write one that it has read from JAX's
    cache, nor says so; the program fails when it is run. JAX says when it looks there and whether it finds
    it, and nothing of one that this process has already, which may have been read there. It is not written
    there, too: to write a program holds Python up for as long as a step takes, and longer."""
    between_parts()
    _listen()
    _here.heard = set()
    with compat.not_written_to_cache():
        found = lowered.compile(compiler_options=options)
    is_new = "compile_requests_use_cache" in _here.heard and "cache_hits" not in _here.heard
    return found, is_new or device.platform != "cpu"


def later(
    name: str | None,
    lower: Callable[[], jax.stages.Lowered],
    devices: Sequence[jax.Device],
    options: Any,
    on_found: Callable[[], object],
) -> Callable[[], jax.stages.Compiled]:
    """What gives a program for ``devices``, in any thread: the one that is kept under ``name``, after
    ``on_found``; or else one that is lowered now, compiled then, and kept if it has a name."""
    # Not by `Path.exists`, which raises for a folder that may not be entered.
    lowered = None if name is not None and os.path.exists(_path(name)) else lower()

    def program() -> jax.stages.Compiled:
        if lowered is None and name is not None and (found := load(name, devices)):
            on_found()
            return found[0]
        made, can_be_kept = compiled(lower() if lowered is None else lowered, devices[0], options)
        if name is not None and can_be_kept:
            save(name, made, None)
        return made

    return program


def save(name: str, compiled: jax.stages.Compiled, note: Any) -> None:
    """Nothing where the program cannot be written, or there is no room."""
    between_parts()
    try:
        found = pickle.dumps((*serialize_executable.serialize(compiled), note))
        _write(_path(name), zlib.compress(found, 1))
    except Exception as error:  # noqa: BLE001 (whatever it is, the program is there)
        _log.info("a compiled program is not kept: %s", error)


def number(name: str | None, find: Callable[[], int]) -> int:
    """What ``find`` gives, which compiles programs to find it: kept, too, if it has a `name_of` them."""
    if name is None:
        return find()
    path = _path(name)
    with suppress(OSError, ValueError):
        kept = int(path.read_text())
        _is_of_use(path)
        return kept
    found = find()
    with suppress(OSError):
        _write(path, str(found).encode())
    return found


def _is_of_use(path: Path) -> None:
    """For `_forget_unused`; whoever may read it, and no more, finds it all the same."""
    with suppress(OSError):
        os.utime(path)


def _write(path: Path, what: bytes) -> None:
    """In one go, for whoever reads."""
    if not path.parent.is_dir():
        path.parent.mkdir(parents=True, exist_ok=True)
        _forget_old(path.parent.parent)
    new = path.parent / f"{_NEW}{secrets.token_hex(8)}"
    try:
        with new.open("xb") as opened:  # as JAX's own, others may read it
            opened.write(what)
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    _forget_unused(path.parent)


def load(name: str, devices: Sequence[jax.Device]) -> tuple[jax.stages.Compiled, Any] | None:
    """The program and its note, for ``devices`` as it was compiled for; None if there is none, or it cannot
    be read."""
    path = _path(name)
    try:
        found = path.read_bytes()
    except OSError:
        return None
    _is_of_use(path)
    try:
        if "mosaic_gpu" in candidates(devices[0]):
            compat.find_gpu_runtime()
        if "native" in candidates(devices[0]):
            cpu.loaded()  # a program names its function, which this tells XLA
        program, in_tree, out_tree, note = pickle.loads(zlib.decompress(found))
        compiled = serialize_executable.deserialize_and_load(
            program, in_tree, out_tree, backend=devices[0].client, execution_devices=devices
        )
    except Exception as error:  # noqa: BLE001 (whatever it is, it can be compiled again)
        _log.warning("the kept program %s is damaged, and compiled again: %s", path, error)
        return None
    return compiled, note


def _path(name: str) -> Path:
    here = folder()
    assert here is not None, "no name is given where programs are not kept"
    return here / name


def _forget_old(folder: Path) -> None:
    """Drops programs of all but the latest few sources and versions."""
    newest = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in newest[_FOLDERS_LEFT:]:
        shutil.rmtree(path, ignore_errors=True)


def _forget_unused(folder: Path) -> None:
    """Drops the programs that were not used for longest, where all of these sources' are too much; and what
    processes left that were killed while they wrote."""
    there = list[tuple[float, int, Path]]()
    for path in folder.iterdir():
        with suppress(FileNotFoundError):  # another thread has written it, or another process dropped it
            found = path.stat()
            if path.name.startswith(_NEW) and found.st_mtime < time.time() - _WRITTEN_S:
                path.unlink()
            else:
                there.append((found.st_mtime, found.st_size, path))
    n_bytes = sum(size for _, size, _ in there)
    for _, size, path in sorted(there):
        if n_bytes <= MOST_BYTES:
            return
        path.unlink(missing_ok=True)
        n_bytes -= size


@cache
def _processor() -> str:
    """Whatever XLA compiles for on a CPU: a folder of programs may be on a disk that hosts share."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    names = ("model name", "flags", "Features", "CPU part", "isa")
    found = dict(line.partition(":")[::2] for line in lines if line.startswith(names))
    return f"{platform.machine()} {sorted(found.items())}"


@cache
def _made_by(platform_version: str) -> str:
    versions = [metadata.version(name) for name in _LIBRARIES]
    return _digest(_sources(), versions, platform.python_version(), platform_version)[:16]


def _settings() -> list[tuple[str, object]]:
    """As they are for this thread now."""
    known = {name: getattr(jax.config, name, value) for name, value in jax.config.values.items()}
    flags = {name: os.environ.get(name) for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")}
    return sorted(flags.items()) + [
        (name, value)
        for name, value in sorted(known.items())
        if isinstance(value, (str, int, float, type(None))) and not any(word in name for word in _OF_PLACES)
    ]


def _sources() -> str:
    found = hashlib.sha256()
    for package in _PACKAGES:
        spec = find_spec(package)
        assert spec is not None and spec.origin is not None, package
        root = Path(spec.origin).parent
        for path in sorted(root.rglob("*.py")):
            found.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return found.hexdigest()


def _digest(*what: object) -> str:
    return hashlib.sha256(repr(what).encode()).hexdigest()
