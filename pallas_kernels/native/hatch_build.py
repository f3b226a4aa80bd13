"""Builds the native kernels when the project is installed or a wheel is made.

Without them XLA serves: what keeps them from being built is told, and the installation goes on.
"""

from __future__ import annotations

import importlib.util
import os
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# By its path: the package would import JAX.
_spec = importlib.util.spec_from_file_location("native_build", Path(__file__).parent / "build.py")
assert _spec is not None and _spec.loader is not None
native = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(native)


class NativeBuildHook(BuildHookInterface[Any]):
    """Puts the library beside its sources, and into a wheel, which is for this platform then."""

    PLUGIN_NAME = "custom"

    def dependencies(self) -> list[str]:
        if _is_off() or native.is_current():
            return []
        # Headers of the oldest JAX that is supported: XLA takes what is built for itself or for an older one.
        return ["jaxlib==0.10.2", *(["ziglang>=0.13"] if native.compiler() is None else [])]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel" or _is_off():
            return
        try:
            library = native.LIBRARY if native.is_current() else native.build()
        except native.CannotBuild as error:
            self.app.display_warning(f"no native CPU kernels, XLA computes attention: {error}")
            return
        build_data["artifacts"].append(str(library.relative_to(self.root)))
        build_data["pure_python"] = False
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"


def _is_off() -> bool:
    return os.environ.get(native.ENV_VAR) == "off"
