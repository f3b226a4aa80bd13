"""What every test leans on: no network, reproducible hypothesis runs, and skips that say what is missing.

Knows nothing of what is tested.
"""

from __future__ import annotations

import functools
import gc
import importlib.util
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

# Before transformers or tokenizers are imported: no test may ask a hub for anything.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Tests in several processes share a GPU: none may take three quarters of it.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# Nor share its cores with threads of torch that spin while they wait: thirty times the work itself.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import jaxtyping
import pytest

# Calls of these rooms' modules that have arrays in signatures are held to their annotations: types, arrays'
# dtypes and axes. A letter is one size within a call, and an int is a float, too. Not held to them: rooms
# within these (`warp_numpy` is called a million times), `jaxlamina.kv`, whose tests take twice as long then, and
# ranks that tests start as processes.
CHECKED = (
    "pallas_kernels",
    "splitter",
    "jaxlamina/ranks",
    "jaxlamina/transports",
    "jaxlamina/workers",
)
ROOT = Path(__file__).resolve().parents[1]
MODULES = [
    ".".join((*room.split("/"), path.stem))
    for room in CHECKED
    for path in (ROOT / room).glob("*.py")
    if "from jaxtyping import" in path.read_text()
]
CHECKER = "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))"
jaxtyping.install_import_hook(MODULES, CHECKER)

if importlib.util.find_spec("hypothesis") is not None:
    from hypothesis import HealthCheck, settings

    # No deadline: the first example of a property compiles, the others do not.
    settings.register_profile("local", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile("ci", parent=settings.get_profile("local"), derandomize=True)
    settings.load_profile("ci" if os.environ.get("CI") else "local")


def why_no_mpi() -> str | None:
    """What keeps `mpi` tests from running here, or None."""
    if shutil.which("mpirun") is None:
        return "no mpirun: apt-get install openmpi-bin libopenmpi-dev"
    if importlib.util.find_spec("mpi4jax") is None:
        return "mpi4jax is not installed: make test installs it, or pip install mpi4jax"
    return None


def why_no_gpus(wanted: int) -> str | None:
    """What keeps `gpu` (wanted=1) and `multi_gpu` (wanted=2) tests from running here, or None."""
    import jax

    n = sum(device.platform in ("gpu", "cuda", "rocm") for device in jax.devices())
    return None if n >= wanted else f"JAX sees {n} GPU(s), this test needs {wanted}"


@pytest.fixture
def unchecked() -> Iterator[None]:
    """For a test that gives stand-ins, or what is wrong: no call in it is held to annotations."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


# Files of minutes, the longest first: begun last, one of them would keep one process at work while the others
# are done.
LONG_FILES = (
    "test_ranks",
    "test_documents",
    "test_find",
    "test_launch_ranks",
    "test_flax_models_ranks",
    "test_attention_backends",
    "test_program_oracle",
    "test_bench",
    "test_local_attention",
    "test_faults",
    "test_faults_product",
    "test_prefix_caching",
    "test_staggered",
    "test_blocks",
    "test_llm",
    "test_supervisor",
    "test_server_load",
    "test_breakdown",
    "test_cli",
    "test_layouts",
    "test_demo_model",
    "test_perplexity",
    "test_prefill_workers",
    "test_server_end",
    "test_dashboard",
    "test_flax_models",
    "test_mixed_steps",
    "test_server_parts",
    "test_clients",
    "test_structured",
    "test_partition",
    "test_tensor_parallel",
    "test_bench_start",
    "test_bench_recovery",
    "test_exchange_bench",
    "test_server",
    "test_pipeline_parallel",
    "test_workers",
    "test_kv_machine",
    "test_transports",
    "test_server_answers",
    "test_batch_troubles",
    "test_server_batches",
    "test_server_input",
    "test_launch_job",
    "test_pause",
    "test_weight_updates",
    "test_kept_programs",
)


def pytest_configure(config: pytest.Config) -> None:
    """Folders of this run, whose processes share them: what jobs of ranks are compared with, and every
    compiled program.

    Most of what tests wait for is compiling; the same tiny models are compiled by many files, servers and
    ranks.
    """
    if "JAXLAMINA_TEST_REFERENCES" in os.environ:
        return
    folder = Path(tempfile.mkdtemp(prefix="jaxlamina-tests-"))
    os.environ["JAXLAMINA_TEST_REFERENCES"] = str(folder)
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder / "xla")
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


def pytest_addoption(parser: pytest.Parser) -> None:
    what = "of each test function and form of KV every Nth of its cases, the first one always (1: all)"
    parser.addoption("--one-of", type=int, default=1, metavar="N", help=what)


# Last, of what markers leave: else a case that is not run may stand for its function.
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    n, n_seen = config.getoption("--one-of"), Counter[tuple[str, str]]()
    chosen, left_out = list[pytest.Item](), list[pytest.Item]()
    for item in items:
        like = item.nodeid.partition("[")[0], _form(item)
        (left_out if n_seen[like] % n else chosen).append(item)
        n_seen[like] += 1
    if left_out:
        config.hook.pytest_deselected(items=left_out)
    rank = {name: i for i, name in enumerate(LONG_FILES)}
    items[:] = sorted(chosen, key=lambda item: rank.get(item.path.stem, len(rank)))


def _form(item: pytest.Item) -> str:
    """Of the KV in a case: a kernel reads each in its own way, so that none stands for another."""
    callspec = getattr(item, "callspec", None)
    params = callspec.params if callspec else {}
    return next((shape.form for shape in params.values() if hasattr(shape, "form")), params.get("form", ""))


def pytest_collection_finish() -> None:
    """What has been imported stays: Python's collections leave it out, and are rarer where tracing makes
    hundreds of thousands of objects."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, *gc.get_threshold()[1:])


@pytest.hookimpl(trylast=True)  # when its fixtures are gone
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Models and programs of a file go with it: JAX would keep what it has traced and compiled, gigabytes and
    millions of objects by the end of a run, which each collection goes through. What is left stays."""
    if nextitem is None or nextitem.path != item.path:
        if "jax" in sys.modules:
            sys.modules["jax"].clear_caches()
        for value in vars(item.module).values():
            if isinstance(value, functools._lru_cache_wrapper) and value.__module__ == item.module.__name__:
                value.cache_clear()
        gc.collect()
        gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    reason = None
    if item.get_closest_marker("mpi"):
        reason = why_no_mpi()
    if item.get_closest_marker("multi_gpu"):
        reason = why_no_gpus(2)
    elif item.get_closest_marker("gpu"):
        reason = why_no_gpus(1)
    if reason is not None:
        pytest.skip(reason)
