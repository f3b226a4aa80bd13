"""What an executor is asked to run. Knows batches; no model, no request and no rank."""

from __future__ import annotations

from dataclasses import dataclass

from jaxlamina.steps.batch import DecodeBatch, PrefillBatch


@dataclass(frozen=True)
class PromptPart:
    """Prompts, or what follows their stored tokens.

    scored: logits after every token are wanted, and not after the last one alone. worker: the prefill worker
    that computes them, by its index, where there are prefill workers; None: model workers do, though there
    are. ready: it has computed them at its own pace (`Executor.begin_prompt`), and the step takes in what
    came of it.
    """

    batch: PrefillBatch
    scored: bool = False
    worker: int | None = 0
    ready: bool = False


@dataclass(frozen=True)
class Step:
    """Rows that get one token each, and prompts that are computed with them. Either may be missing. A prompt
    may follow tokens of one before it."""

    decodes: DecodeBatch | None = None
    prompts: tuple[PromptPart, ...] = ()

    @property
    def alongside(self) -> PrefillBatch | None:
        """The prompt whose tokens can be rows of the decode step's program: one, with rows beside it, and not
        scored."""
        if self.decodes is None or len(self.prompts) != 1 or self.prompts[0].scored:
            return None
        return self.prompts[0].batch

    @property
    def apart(self) -> list[Step]:
        """The same as steps one after another: the rows first, then each prompt."""
        rows = [] if self.decodes is None else [Step(self.decodes)]
        return rows + [Step(prompts=(prompt,)) for prompt in self.prompts]
