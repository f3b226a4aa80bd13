"""Compiling before anybody waits: every program that requests of a model may meet.

``warm_up`` compiles sizes that it is given (`jaxlamina.engine.sizes_to_compile`) before a server answers, and
`Behind` the others meanwhile. Knows an executor, its threads and batches of padding; nothing of requests or
servers, and not which sizes there are. Where an executor can, other threads compile several programs at once.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxlamina.engine.engine import Engine
from jaxlamina.process.compile_ahead import Ahead, beside_steps, n_compiling, side_by_side
from jaxlamina.process.turns import wait_between_parts
from jaxlamina.run.executor import StepLogits
from jaxlamina.steps.batch import DecodeBatch, PrefillBatch
from jaxlamina.steps.buckets import StepSizes
from jaxlamina.steps.step import PromptPart, Step
from jaxlamina.workers.kv_pools import move_sizes

_log = logging.getLogger("uvicorn.error")
_ASK_AGAIN_S = 0.25


def warm_up(
    engine: Engine,
    todo: Sequence[StepSizes],
    on_done: Callable[[int], None],
    stopped: Callable[[], bool],
    *,
    all_of_drawing: bool = True,
) -> None:
    """Compiles each of ``todo``, and once a batch size all that may be done with logits. No request may be
    there, nor anything in the prefix cache. What the executor cannot compile ahead is run once: where several
    workers share requests or tokens, a step's programs depend on where its tokens lie, and those of full and
    evenly shared rows are run.

    ``on_done(n)`` when one more is compiled, for the last when all are; ``stopped()`` is asked before each,
    and True ends it early. ``all_of_drawing``: or only what every request needs of that.
    """
    n_done = 0

    def done() -> None:
        nonlocal n_done
        n_done += 1
        if n_done < len(todo):
            on_done(n_done)

    # First, since a rank that compiles its moves does nothing else; and no step is run while others compile,
    # which try kernels out on the device.
    _move(engine)
    sizes = {shape.batch for shape in todo}

    def prepare_drawing() -> None:
        for usual in (True, False) if all_of_drawing else (True,):
            _prepare_drawing(engine, sizes, stopped, usual=usual)

    compiled: set[StepSizes] = set()
    side_by_side([lambda: compiled.update(_compile_ahead(engine, todo, done, stopped)), prepare_drawing])
    for shape in todo:
        if stopped():
            return
        if shape.of_all:
            _prepare_scores(engine, shape)
        if shape not in compiled:
            jax.block_until_ready(_run(engine, shape))
            done()
    if stopped():
        return
    _try(engine, compiled)
    engine.sizes.add(todo)
    if todo:
        on_done(len(todo))


class _StoppedError(Exception):
    """`Behind` has been told to stop."""


class Behind:
    """Compiles ``todo`` while requests are answered, ``n_at_once``, the sizes that steps have wanted first,
    by threads of its own.

    ``between_steps(call)`` has the engine's thread do so when no step is being launched; from then on steps
    are padded to the new sizes, too. ``on_done(n)`` when one more is there, of `n_all`.
    """

    def __init__(
        self,
        engine: Engine,
        todo: Sequence[StepSizes],
        on_done: Callable[[int], None],
        between_steps: Callable[[Callable[[], None]], None],
        n_at_once: int = 1,
        again: Sequence[StepSizes] = (),
        *,
        nobody_waits: bool = False,
    ) -> None:
        """``again``: sizes that are there, but for steps that attention workers take part in. They are
        compiled first; from then on those may take part (`Executor.stay_alone`). ``nobody_waits``: until
        `go_on_with` there are no requests."""
        self._again, self._nobody_waits = set(again), nobody_waits
        todo = [*again, *todo]
        self.n_all, self.n_done = len(todo), 0
        self._n_at_once = n_at_once
        self._engine, self._todo, self._on_done = engine, list(todo), on_done
        self._between_steps = between_steps
        self._handing_over = threading.Lock()
        self._call: Callable[[], None] | None = None  # that is to be made between steps
        self._not_before = 0.0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="compile behind", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def go_on_with(
        self, on_done: Callable[[int], None], between_steps: Callable[[Callable[[], None]], None]
    ) -> None:
        """From now on with these. The ones before make no call any more; one that they have not made goes to
        the new ones."""
        with self._handing_over:
            self._nobody_waits = False
            self._on_done, self._between_steps = on_done, between_steps
            if self._call is not None:
                between_steps(self._call)

    def rest(self, seconds: float) -> None:
        """Begins no other part of a program for so long."""
        self._not_before = time.monotonic() + seconds

    def _rest_over(self) -> None:
        """Waits until then. `_StoppedError` once it is told to stop."""
        while (left_s := self._not_before - time.monotonic()) > 0 and not self._stopped.is_set():
            self._stopped.wait(left_s)
        if self._stopped.is_set():
            raise _StoppedError

    def _draw(self, n_rows: set[int], *, usual: bool) -> None:
        _prepare_drawing(self._engine, n_rows, self._stopped.is_set, usual=usual)

    def stop(self) -> None:
        """What is being compiled is not waited for."""
        self._stopped.set()

    def join(self, deadline_s: float) -> bool:
        """Whether all is compiled, or given up, by then."""
        self._thread.join(deadline_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        wait_between_parts(self._rest_over)
        with beside_steps():
            self._compile_all()

    def _compile_all(self) -> None:
        _give_way()
        drawn = {shape.batch for shape in self._engine.sizes.shapes}
        try:
            self._draw(drawn, usual=False)
            while self._todo and not self._stopped.is_set():
                these = self._next()
                self._compile(these, drawn)
                for shape in these:
                    if self._stopped.is_set():
                        return
                    self._between(partial(self._adopt, shape))
                    self.n_done += 1
                    self._on_done(self.n_done)
        except Exception:  # noqa: BLE001 (whatever it is: what is compiled by now serves every request)
            if not self._stopped.is_set():
                _log.exception(
                    "a program could not be compiled: steps go on with the larger ones that there are"
                )

    def _next(self) -> list[StepSizes]:
        """Those that would save steps most padding, or the first. Where nobody waits, the last: the job that
        serves compiles the same ones, and so each finds on disk what the other has done."""
        wanted, todo = self._engine.sizes.wanted, self._todo[:: -1 if self._nobody_waits else 1]
        found = sorted(todo, key=lambda shape: (shape not in self._again, -wanted[shape]))
        found = found[: self._n_at_once]
        self._todo = [shape for shape in self._todo if shape not in found]
        return found

    def _compile(self, these: list[StepSizes], drawn: set[int]) -> None:
        """Returns once all of them are compiled, on all ranks: until then nothing new is run (`_load`)."""
        engine = self._engine
        compiles = []
        for shape in these:
            self._rest_over()
            compiles.append(_later(engine, shape, behind=True))

        def prepare_drawing() -> None:
            for shape in these:
                if shape.batch not in drawn:
                    drawn.add(shape.batch)
                    for usual in (True, False):
                        self._draw({shape.batch}, usual=usual)
                if shape.of_all:
                    _prepare_scores(engine, shape)

        side_by_side([prepare_drawing, *(call for call in compiles if call is not None)])
        found: list[bool] = []
        while not (found and all(found)) and not self._stopped.is_set():
            if found:
                time.sleep(_ASK_AGAIN_S)  # another rank is still compiling
            found.clear()
            self._between(lambda: found.extend(_prepare(engine, shape) for shape in these))

    def _adopt(self, shape: StepSizes) -> None:
        """Steps are padded to ``shape`` from now on."""
        engine, device = self._engine, self._engine.executor.device
        is_new = all(other.batch != shape.batch for other in engine.sizes.shapes)
        _load(engine, shape, nobody_waits=self._nobody_waits)
        if is_new and self._nobody_waits and _loads_at_first_run(device):
            engine.drawing.rehearse(device, shape.batch)
        self._engine.sizes.add([shape])
        if shape in self._again:
            self._again.discard(shape)
            if not self._again:
                self._engine.executor.stay_alone(False)

    def _between(self, call: Callable[[], None]) -> None:
        """Has the engine's thread do so between two steps, and waits for it."""
        done = threading.Event()

        def run() -> None:
            call()
            self._call = None
            done.set()

        with self._handing_over:
            self._call = run
            self._between_steps(run)
        while not (done.wait(0.1) or self._stopped.is_set()):
            pass


def _give_way() -> None:
    """This thread's Python and tracing after other threads': a step is not to wait for them. Linux has
    priorities a thread."""
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


def _later(engine: Engine, shape: StepSizes, *, behind: bool = False) -> Callable[[], Any] | None:
    if shape.own_pace:
        return None
    return engine.executor.compile_later(_step(engine, shape, _empty_batch), behind=behind)


def _prepare(engine: Engine, shape: StepSizes) -> bool:
    """What is left to do before a compiled step is run: ranks compare what they will exchange. False: not all
    have compiled."""
    return engine.executor.prepare(_step(engine, shape, _empty_batch))


def _compile_ahead(
    engine: Engine, todo: Sequence[StepSizes], done: Callable[[], None], stopped: Callable[[], bool]
) -> set[StepSizes]:
    """Has other threads compile the programs of ``todo``, as many at once as pays, where the executor has
    ``compile_later`` and knows them before they run; which those were. What one failed with is raised."""
    ahead: Ahead[Any] = Ahead()
    begun: deque[StepSizes] = deque()
    compiled: set[StepSizes] = set()

    def take() -> None:
        shape = begun.popleft()
        ahead.take(shape)
        compiled.add(shape)
        done()

    try:
        for shape in todo:
            if stopped():
                return compiled
            compiles = _later(engine, shape)
            if compiles is not None:
                ahead.begin(shape, compiles)
                begun.append(shape)
            if len(begun) > n_compiling():
                take()
        while begun and not stopped():
            take()
        for shape in todo:
            while shape in compiled and not (_prepare(engine, shape) or stopped()):
                time.sleep(_ASK_AGAIN_S)
        return compiled
    finally:
        ahead.forget()


def _prepare_drawing(engine: Engine, n_rows: set[int], stopped: Callable[[], bool], *, usual: bool) -> None:
    """Has other threads compile what is done with logits of so many rows: many small programs. ``usual``:
    those that every request needs one of, or the others."""
    device, longest = engine.executor.device, engine.admission.max_model_len

    def compile_for(n: int) -> None:
        engine.drawing.compile(device, n, longest, usual=usual)

    ahead: Ahead[None] = Ahead(n_compiling(cores_each=1))
    try:
        for n in sorted(n_rows):
            ahead.begin(n, partial(compile_for, n))
        for n in sorted(n_rows):
            if stopped():
                return
            ahead.take(n)
    finally:
        ahead.forget()


def _prepare_scores(engine: Engine, shape: StepSizes) -> None:
    engine.drawing.compile_scores(engine.executor.device, shape.n_tokens)


def _step(engine: Engine, shape: StepSizes, made: Callable[[StepSizes, int, int], Any]) -> Step:
    """One of such sizes; its batches are ``made(sizes, n_slots, most)``."""
    most, n_slots = engine.admission.max_model_len, engine.executor.n_slots
    prompt = shape.alongside if shape.kind == "decode" else shape
    rows = made(shape, n_slots, most) if shape.kind == "decode" else None
    if prompt is None:
        return Step(rows)
    batch = made(prompt, n_slots, most)
    return Step(rows, tuple(PromptPart(batch, prompt.of_all, worker) for worker in prompt.workers or (None,)))


def _try(engine: Engine, compiled: Collection[StepSizes]) -> None:
    """Of what was compiled and not run the smallest decode step, since a model that cannot be run is to end a
    server's start, and what is to be run before others compile again."""
    steps = [shape for shape in compiled if shape.kind == "decode" and shape.alongside is None]
    if steps:
        smallest = min(steps, key=lambda shape: (shape.batch, shape.context))
        _rehearse(engine, smallest)
    for shape in compiled:
        _load(engine, shape, nobody_waits=True)
    if _loads_at_first_run(engine.executor.device):
        for n in {shape.batch for shape in compiled}:
            engine.drawing.rehearse(engine.executor.device, n)


def _load(engine: Engine, shape: StepSizes, *, nobody_waits: bool) -> None:
    """Runs a program once, on padding alone, if its first run must not fall together with another's
    compilation; or where ``nobody_waits``, so that nobody waits for what is loaded then."""
    if (shape.has_prompt or nobody_waits) and _loads_at_first_run(engine.executor.device):
        _rehearse(engine, shape)


def _rehearse(engine: Engine, shape: StepSizes) -> None:
    """Padding needs no place, so that nothing is touched that requests have."""
    engine.executor.rehearse(_step(engine, shape, _empty_batch))


def _loads_at_first_run(device: jax.Device) -> bool:
    """Whether a program's kernels are loaded by its first run. cuDNN loads a prompt's attention by a CUDA
    graph, which whatever another thread asks of the GPU meanwhile spoils, or ends the process
    (docs/findings.md)."""
    return device.platform == "gpu"


def _move(engine: Engine) -> None:
    """To the host and back, whatever is there: it is nobody's."""
    executor, host = engine.executor, engine.scheduler.host
    if host is None:
        return
    most = min(engine.admission.max_model_len, executor.n_slots, host.capacity)
    for n in move_sizes(most):
        executor.rehearse_moves(min(n, most))


def _run(engine: Engine, shape: StepSizes) -> StepLogits:
    executor, places = engine.executor, engine.capabilities.places_tokens
    if shape.own_pace:
        return _run_at_own_pace(engine, shape)
    step = _step(engine, shape, _stored_batch if places else _empty_batch)
    if places:
        rows = () if step.decodes is None else (step.decodes,)
        for batch in (*rows, *(part.batch for part in step.prompts[:1])):
            n_distinct = len(np.unique(batch.slot_table[:, 0])) if batch.slot_table.size else 0
            executor.assume_stored(type(batch)(*(x[:n_distinct] for x in batch)))
    logits = executor.run(step)
    if places:
        executor.release(np.arange(executor.n_slots))
    return logits


def _run_at_own_pace(engine: Engine, shape: StepSizes) -> StepLogits:
    """A prompt's first chunk and a later one, on padding but for what is taken in where programs depend on
    that; the worker has a deadline of its own for them."""
    executor, [worker] = engine.executor, shape.workers
    places, most = engine.capabilities.places_tokens, engine.admission.max_model_len
    batch = (_stored_batch if places else _empty_batch)(shape, executor.n_slots, most)
    assert isinstance(batch, PrefillBatch)
    for start in (1, 0) if shape.n_tokens < most else (0,):
        follows = batch._replace(lengths=np.full(1, start, np.int32))
        executor.begin_prompt(PromptPart(follows, worker=worker))
        while not executor.computed(_ASK_AGAIN_S):
            pass
    logits = executor.run(Step(prompts=(PromptPart(batch, worker=worker, ready=True),)))
    if places:
        executor.release(np.arange(executor.n_slots))
    return logits


def _empty_batch(shape: StepSizes, n_slots: int, _most: int) -> DecodeBatch | PrefillBatch:
    """Rows of padding alone."""
    b, t = shape.batch, shape.n_tokens
    tokens, table, lengths = _zeros(b, t), _zeros(b, shape.context), _zeros(b)
    if shape.kind == "decode":
        return DecodeBatch(tokens, _zeros(b, 1), table, lengths, _zeros(b) + n_slots)
    return PrefillBatch(tokens, _zeros(b, t), _zeros(b), _zeros(b, t) + n_slots, table, lengths)


def _stored_batch(shape: StepSizes, n_slots: int, most: int) -> DecodeBatch | PrefillBatch:
    """Rows of as many tokens as go in, of at most ``most`` each; those that find no slots of their own are
    copies of earlier ones, and store nothing."""
    batch = _empty_batch(shape, n_slots, most)
    n_stored = min(shape.context, most - 1, n_slots - 1)
    n_new = min(shape.n_tokens, n_slots - n_stored)
    n_each = n_stored + n_new
    n_own = min(shape.batch, n_slots // n_each)
    first = np.arange(shape.batch, dtype=np.int32) % n_own * n_each
    batch.slot_table[:, :n_stored] = first[:, None] + np.arange(n_stored)
    batch.lengths[:] = n_stored
    batch.positions[:] = n_stored + np.minimum(np.arange(shape.n_tokens), n_new - 1)
    new = batch.new_slots[:, None] if isinstance(batch, DecodeBatch) else batch.slots
    new[:n_own, :n_new] = first[:n_own, None] + n_stored + np.arange(n_new)
    if isinstance(batch, PrefillBatch):
        batch.logits_at[:] = n_new - 1
    return batch


def _zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.int32)
