"""Programs that other threads compile while this one goes on. Knows no program: keys, calls that give one,
jitted functions.

XLA compiles without Python's lock, so several programs at once are done sooner than one after another;
tracing them stays with the thread that asks.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from typing import Any, Generic, TypeVar

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from jaxlamina.process import garbage, kept_programs
from jaxlamina.process.turns import between_parts, short_turns

T = TypeVar("T")
# XLA itself uses more for parts of a program, and tracing has to keep up with them.
_MOST_THREADS = 8


def n_compiling(cores_each: int = 2) -> int:
    """How many programs are compiled at once: one for two cores, up to eight. Small ones keep no more than
    one core busy."""
    return max(1, min(_MOST_THREADS, (os.cpu_count() or 1) // cores_each))


class Ahead(Generic[T]):
    """``begin`` a program, go on with others, and ``take`` it when it is wanted. ``n_threads``: None for
    `n_compiling`."""

    def __init__(self, n_threads: int | None = None) -> None:
        self._n_threads = n_threads or n_compiling()
        self._threads: ThreadPoolExecutor | None = None
        self._begun: dict[Hashable, Future[T]] = {}

    def __len__(self) -> int:
        return len(self._begun)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._begun

    def begin(self, key: Hashable, compiles: Callable[[], T]) -> None:
        """Has ``compiles`` called by another thread; nothing if that of ``key`` is there already."""
        if key in self._begun:
            return
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._n_threads, "compile")
        self._begun[key] = self._threads.submit(copy_context().run, compiles)

    def is_done(self, key: Hashable) -> bool:
        """Whether `take` need not wait."""
        future = self._begun.get(key)
        return future is None or future.done()

    def take(self, key: Hashable) -> T | None:
        """What came of it, once it is done; what it failed with is raised. None if it was not begun, or is
        taken."""
        future = self._begun.pop(key, None)
        return None if future is None else future.result()

    def forget(self) -> None:
        """Waits for what is being compiled, and drops it and all that was begun; the threads end."""
        threads, self._threads, self._begun = self._threads, None, {}
        if threads is not None:
            threads.shutdown(cancel_futures=True)


@contextmanager
def beside_steps() -> Iterator[None]:
    """While threads of this process trace programs and another one runs steps: that one waits for Python for
    a short time only, and a step asks for it some hundred times."""
    with short_turns(), garbage.young_only():
        yield


def side_by_side(calls: Sequence[Callable[[], object]]) -> None:
    """Each called by a thread of its own, for which a process that ends does not wait. What the first of
    those that failed raised is raised, once all are done."""
    errors: dict[int, BaseException] = {}

    def run(i: int, call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 (it is raised where it is waited for)
            errors[i] = error

    threads = [
        threading.Thread(target=copy_context().run, args=(run, i, call), name=f"compile_{i}", daemon=True)
        for i, call in enumerate(calls)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[min(errors)]


_here = threading.local()


@contextmanager
def only_compiled(device: jax.Device) -> Iterator[Callable[..., jax.ShapeDtypeStruct]]:
    """Within it, in this thread, a `ProgramAhead` is compiled for what it is called with, and not run:
    whatever a GPU is asked to do meanwhile is in the way of a step whose kernels are being put into a CUDA
    graph (docs/findings.md). Yields what stands for an array of ``device``: its shape and dtype."""
    _here.sharding = sharding = SingleDeviceSharding(device)
    try:
        yield lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
    finally:
        _here.sharding = None


# Kernels are not tried out: XLA does so in memory that a step may still be using, and these are small.
_OPTIONS = {"xla_gpu_autotune_level": 0}


class ProgramAhead:
    """A function to be jitted, of arrays that are on one device or the host, which may be compiled while
    steps run. Its programs are kept on disk by name (`kept_programs`), so that a second process traces none:
    to trace, lower and look one up takes four times as long as to read it (docs/findings.md).

    ``static``: names of arguments that are not arrays, and are given by name."""

    def __init__(self, function: Callable[..., Any], *, static: Sequence[str] = ()) -> None:
        self._jitted = jax.jit(function, compiler_options=_OPTIONS, static_argnames=tuple(static))
        self._name = f"{function.__module__}.{function.__qualname__}"
        if "<" in function.__qualname__:
            raise ValueError(f"{self._name} is no function of a module: give one with a name of its own")
        self._programs: dict[Hashable, jax.stages.Compiled] = {}

    @property
    def n_programs(self) -> int:
        return len(self._programs)

    def __call__(self, *args: Any, **static: Any) -> Any:
        leaves, tree = jax.tree.flatten(args)
        key = tree, tuple([_kind_of(x) for x in leaves]), tuple(static.items())
        program = self._programs.get(key) or self._made(key, args, static)
        if getattr(_here, "sharding", None) is None:
            return program(*args)
        return jax.tree.map(_like, program.out_info)

    def _made(self, key: Any, args: Sequence[Any], static: Mapping[str, Any]) -> jax.stages.Compiled:
        between_parts()
        tree, kinds, options = key
        device = _device_of(jax.tree.leaves(args))
        what = self._name, str(tree), [str(kind[:3]) for kind in kinds], options, _OPTIONS
        self._programs[key] = made = kept_programs.later(
            kept_programs.name_of(device, *what),
            lambda: self._jitted.lower(*args, **static),
            [device],
            _OPTIONS,
            lambda: None,
        )()
        return made


def _like(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=_here.sharding)


def _kind_of(x: Any) -> tuple[Hashable, ...]:
    """All of an argument that its program depends on."""
    if type(x) is np.ndarray:
        return x.shape, x.dtype
    if isinstance(x, jax.Array):
        return x.shape, x.dtype, x.weak_type, x.sharding if x.committed else None
    if isinstance(x, jax.ShapeDtypeStruct):
        return x.shape, x.dtype, x.weak_type, x.sharding
    return (str(type(x)),)


def _device_of(leaves: Sequence[Any]) -> jax.Device:
    """Where a program of such arguments runs: JAX leaves those where they are that have been put there."""
    there = [x for x in leaves if isinstance(x, (jax.Array, jax.ShapeDtypeStruct))]
    there = [x for x in there if isinstance(x, jax.ShapeDtypeStruct) or x.committed] or there
    (device,) = there[0].sharding.device_set
    return device
