"""What runs a model's steps and keeps the KV between them: the one thing that the engine knows of how a model
is run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxlamina.kv.kept import KeptFound, KeptWanted, Lost
from jaxlamina.kv.placement import Held
from jaxlamina.steps.batch import DecodeBatch, PrefillBatch
from jaxlamina.steps.buckets import Cut
from jaxlamina.steps.step import PromptPart, Step


@dataclass(frozen=True)
class Capabilities:
    """What an executor can do.

    - ``bucket_cut``: how finely sizes are cut for it.
    - ``n_prefill_workers``: workers that compute prompts beside the rows of a step. With some, prompts are
      theirs, but for what at most ``local_prefill_tokens`` tokens are missing of after stored ones.
    - ``own_pace_tokens``: how many tokens of a prompt such a worker computes at once at its own pace
      (`Executor.begin_prompt`); 0: it keeps step with the rows.
    - ``places_tokens``: a step's programs depend on where its tokens lie, and `Executor.release` keeps
      workers balanced.
    - ``compiles_behind``: programs can be compiled while others run.
    - ``batches_prompts``: several prompts can be one call; ``prompt_batch_tokens``: of how many tokens at
      best, 0: none.
    - ``rounds_kv``: KV is stored with fewer bits than a prompt's tokens have for each other, so a prompt
      whose KV is found is not quite the same as one that is computed.
    - ``why_not_mixed``: why a prompt cannot be computed along with rows, and what to do instead; None if it
      can.
    """

    bucket_cut: Cut = "fine"
    n_prefill_workers: int = 0
    own_pace_tokens: int = 0
    local_prefill_tokens: int = 0
    places_tokens: bool = False
    compiles_behind: bool = False
    batches_prompts: bool = False
    prompt_batch_tokens: int = 0
    rounds_kv: bool = False
    why_not_mixed: str | None = None


class StepLogits(NamedTuple):
    """Float32 logits of a step: ``[B, V]`` after the rows' new tokens, None without rows; and of each prompt
    ``[B, V]`` after its rows' last tokens, or ``[B, T, V]`` if it is scored."""

    decodes: jax.Array | None
    prompts: tuple[jax.Array, ...] = ()

    @classmethod
    def joined(cls, parts: Sequence[StepLogits]) -> StepLogits:
        """Those of the steps that `Step.apart` gives."""
        rows = next((part.decodes for part in parts if part.decodes is not None), None)
        return cls(rows, tuple(logits for part in parts for logits in part.prompts))


class Executor(ABC):
    """Runs a model over batches, and keeps the KV of ``n_slots`` slots, and of ``n_host_slots`` in the host's
    memory."""

    n_slots: int
    n_host_slots: int = 0
    # Staggered batches of the last step of rows.
    latest_n_batches: int = 1
    # The ranks that run the steps (`jaxlamina.job.group.Group`), where there are several.
    group: Any = None
    # Called when a step's program is about to be called, which takes milliseconds and no Python, or to be
    # compiled: a good time for other threads' work.
    on_launch: Callable[[], None] = staticmethod(lambda: None)

    @property
    @abstractmethod
    def device(self) -> jax.Device:
        """Where logits are."""

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities()

    @abstractmethod
    def run(self, step: Step) -> StepLogits:
        """Launches a step. The tokens of its rows may be an array on the device. ``ValueError`` for batches
        that cannot be."""

    def begin_prompt(self, part: PromptPart) -> None:
        """Has a prefill worker compute a prompt's chunk at its own pace; its earlier tokens, if there are
        any, are those that this worker has computed last. Once `computed` names the worker, a step takes the
        chunk in, with the same batch and ``ready``. Until then the worker is to be asked for nothing else."""
        raise NotImplementedError

    def computed(self, wait_s: float = 0.0) -> list[int]:
        """Prefill workers that are done with their chunks since this was asked last. ``wait_s``: for so long
        at most, until there is one."""
        return []

    def put_weights(self, params: Mapping[str, jax.Array]) -> None:
        """Steps from now on are computed with these parameters, of the same names, shapes and dtypes as those
        that the model was made with. Between two steps; KV stays as it is."""
        raise NotImplementedError

    def decode(self, batch: DecodeBatch) -> jax.Array:
        """A step of rows alone: logits ``[B, V]``."""
        logits = self.run(Step(batch)).decodes
        assert logits is not None
        return logits

    def prefill(self, batch: PrefillBatch, *, scored: bool = False) -> jax.Array:
        """A step of prompts alone: logits ``[B, V]``, or ``[B, T, V]`` if they are ``scored``."""
        [logits] = self.run(Step(prompts=(PromptPart(batch, scored),))).prompts
        return logits

    def compile_later(self, step: Step, *, behind: bool = False) -> Callable[[], Any] | None:
        """Traces the programs that a step of such sizes runs. The call that comes back compiles them, in any
        thread; the step then has nothing to compile. ``behind``: while other steps run. None where there is
        nothing to compile, or what it is cannot be known before the step runs."""
        return None

    def prepare(self, step: Step) -> bool:
        """What is left to do before a step that `compile_later` was called for is run. False: ask again
        later."""
        return True

    def stay_alone(self, alone: bool) -> bool:
        """While ``alone``, new tokens' attention stays where the model is as far as it may, so that programs
        of attention workers can be compiled later. Whether that is so then: not where a share is fixed."""
        return False

    def rehearse(self, step: Step) -> None:
        """Runs the programs of a step of padding alone, which were compiled, and waits for them."""
        jax.block_until_ready(self.run(step))

    def rehearse_moves(self, n: int) -> None:
        """Moves n slots to the host and back, whatever is there: before there are requests."""
        slots = np.arange(n)
        self.move_out(slots, slots)
        self.move_in(slots, slots)

    def copy_slots(self, src: np.ndarray, dst: np.ndarray) -> None:
        """Slot ``src[i]``'s KV of all layers also into ``dst[i]``; no slot may be in both."""
        raise NotImplementedError

    def move_out(self, slots: np.ndarray, host_slots: np.ndarray) -> None:
        """Copies the KV of ``slots`` into the host's ``host_slots``; ``UserError`` if there are none."""
        raise NotImplementedError

    def move_in(self, host_slots: np.ndarray, slots: np.ndarray) -> None:
        """Brings the host's ``host_slots`` back into ``slots``, and empties them."""
        raise NotImplementedError

    def open_kept(self, wanted: KeptWanted) -> KeptFound:
        """Begins to keep KV in host memory, or goes on with what an earlier process kept."""
        raise NotImplementedError

    def keepers_of(self, slots: np.ndarray) -> np.ndarray:
        """Which of `KeptFound`'s keepers the KV of each of ``slots`` can be kept by."""
        raise NotImplementedError

    @property
    def n_behind(self) -> int:
        """Tokens that `keep` was told of and that are not written yet, of the keeper that has the most: they
        take the device's and the host's memory."""
        raise NotImplementedError

    def take_lost(self, places: np.ndarray) -> Lost:
        """Places where `keep` was to keep tokens and a keeper had no memory for them, as far as that is known
        and was not asked before; waits until it is known of ``places``."""
        raise NotImplementedError

    def keep(self, slots: np.ndarray, places: np.ndarray, marks: np.ndarray) -> None:
        """Copies the KV of ``slots`` to ``places`` of its keepers, to be known there by ``marks``."""
        raise NotImplementedError

    def bring(self, places: np.ndarray, slots: np.ndarray) -> None:
        """Copies what is kept at ``places`` into ``slots``; it stays kept."""
        raise NotImplementedError

    def release(self, slots: np.ndarray) -> None:  # noqa: B027 (most have nothing to do)
        """``slots`` are nobody's now. Need not be called; it keeps several workers balanced that share out
        tokens."""

    def assume_stored(self, batch: DecodeBatch | PrefillBatch) -> None:  # noqa: B027 (the same)
        """Takes it that a batch's earlier tokens, in slots that are all distinct, have been stored: for steps
        whose results nobody looks at."""

    def held(self) -> list[Held]:
        """What each worker keeps of the KV: attention workers, then model workers. Here one has all."""
        return [Held("model", None, self.n_slots)]

    def staggering(self) -> dict[str, Any] | None:
        """How steps of rows are staggered; None where they never are."""
        return None

    def local_attention(self) -> dict[str, Any] | None:
        """Which share of the attention stays on model ranks, and why; None where none does."""
        return None


class WrappedExecutor(Executor):
    """Another executor, to which it hands all on: for what looks at each step, or takes a part of it over."""

    def __init__(self, executor: Executor) -> None:
        self.inner = executor
        self.n_slots, self.n_host_slots, self.group = executor.n_slots, executor.n_host_slots, executor.group

    @property
    def device(self) -> jax.Device:
        return self.inner.device

    @property
    def capabilities(self) -> Capabilities:
        return self.inner.capabilities

    def run(self, step: Step) -> StepLogits:
        return self.inner.run(step)

    def begin_prompt(self, part: PromptPart) -> None:
        self.inner.begin_prompt(part)

    def computed(self, wait_s: float = 0.0) -> list[int]:
        return self.inner.computed(wait_s)

    def put_weights(self, params: Mapping[str, jax.Array]) -> None:
        self.inner.put_weights(params)

    def compile_later(self, step: Step, *, behind: bool = False) -> Callable[[], Any] | None:
        return self.inner.compile_later(step, behind=behind)

    def prepare(self, step: Step) -> bool:
        return self.inner.prepare(step)

    def stay_alone(self, alone: bool) -> bool:
        return self.inner.stay_alone(alone)

    def rehearse_moves(self, n: int) -> None:
        self.inner.rehearse_moves(n)

    def copy_slots(self, src: np.ndarray, dst: np.ndarray) -> None:
        self.inner.copy_slots(src, dst)

    def move_out(self, slots: np.ndarray, host_slots: np.ndarray) -> None:
        self.inner.move_out(slots, host_slots)

    def move_in(self, host_slots: np.ndarray, slots: np.ndarray) -> None:
        self.inner.move_in(host_slots, slots)

    def open_kept(self, wanted: KeptWanted) -> KeptFound:
        return self.inner.open_kept(wanted)

    def keepers_of(self, slots: np.ndarray) -> np.ndarray:
        return self.inner.keepers_of(slots)

    @property
    def n_behind(self) -> int:
        return self.inner.n_behind

    def take_lost(self, places: np.ndarray) -> Lost:
        return self.inner.take_lost(places)

    def keep(self, slots: np.ndarray, places: np.ndarray, marks: np.ndarray) -> None:
        self.inner.keep(slots, places, marks)

    def bring(self, places: np.ndarray, slots: np.ndarray) -> None:
        self.inner.bring(places, slots)

    def release(self, slots: np.ndarray) -> None:
        self.inner.release(slots)

    def assume_stored(self, batch: DecodeBatch | PrefillBatch) -> None:
        self.inner.assume_stored(batch)

    def held(self) -> list[Held]:
        return self.inner.held()

    def staggering(self) -> dict[str, Any] | None:
        return self.inner.staggering()

    def local_attention(self) -> dict[str, Any] | None:
        return self.inner.local_attention()
