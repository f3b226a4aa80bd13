"""Requests whose prompts' KV is taken to be there: what is measured is decoding, as in the Lamina papers,
which leave prompts out (Lamina 2025 §6.1).

Knows executors and steps; no clock.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxlamina.run.executor import Executor, StepLogits, WrappedExecutor
from jaxlamina.steps.batch import PrefillBatch
from jaxlamina.steps.step import PromptPart, Step


class KvPresent(WrappedExecutor):
    """Runs rows alone. A prompt's tokens take their slots, whose KV is what the pools were made with, and its
    logits ``[1, V]`` are zeros: the tokens that follow mean nothing."""

    def __init__(self, executor: Executor, vocab_size: int) -> None:
        super().__init__(executor)
        self._logits = jax.device_put(jnp.zeros((1, vocab_size), jnp.float32), executor.device)

    def run(self, step: Step) -> StepLogits:
        for part in step.prompts:
            self.inner.assume_stored(_stored(part.batch))
        found = self.inner.run(Step(step.decodes)).decodes if step.decodes is not None else None
        return StepLogits(found, tuple(self._of(part) for part in step.prompts))

    def _of(self, part: PromptPart) -> jax.Array:
        assert not part.scored, "nothing is computed that could be scored"
        return jnp.broadcast_to(self._logits, (len(part.batch.tokens), self._logits.shape[1]))


def _stored(batch: PrefillBatch) -> PrefillBatch:
    """The same, with its new tokens as earlier ones. It must have no others."""
    assert not batch.lengths.any(), "a prompt comes whole"
    return batch._replace(slot_table=batch.slots, lengths=batch.logits_at + 1)
