"""JAX's persistent compilation cache, switched on once a process. Knows no model."""

from __future__ import annotations

import logging

import jax
from jax.experimental.compilation_cache import compilation_cache

from jaxlamina.errors import UserError
from jaxlamina.process.cache_folder import make_programs_dir

_log = logging.getLogger(__name__)


def keep_programs() -> None:
    """Keeps compiled programs on disk under the project's cache folder, so that the next process starts in
    seconds.

    A folder that the user has set (``JAX_COMPILATION_CACHE_DIR``) is left as it is.
    """
    if jax.config.values["jax_compilation_cache_dir"] is not None:
        return
    try:
        folder = make_programs_dir()
    except OSError:  # a read-only home: every process compiles for itself
        return
    except UserError as error:
        _log.warning("compiled programs are not kept: %s", error)
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    compilation_cache.reset_cache()  # or JAX goes on without one if it has compiled anything before
