"""From a prompt and its parameters to a job: what is checked when a request is queued.

Knows the vocabulary, the model's length and a tokenizer; nothing of slots, scheduling or devices.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from jaxlamina.errors import UserError
from jaxlamina.jobs import Job
from jaxlamina.sampling import SamplingParams
from jaxlamina.structured import Grammars, Matcher
from jaxlamina.text import GeneratedText, NoText


class Admission:
    """Makes jobs. ``seed``: requests without a seed of their own get theirs from it."""

    def __init__(
        self,
        tokenizer: Any | None,
        *,
        vocab_size: int,
        max_model_len: int,
        eos_token_ids: Sequence[int],
        seed: int,
    ) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.eos_token_ids = tuple(eos_token_ids)
        self._grammars: Grammars | None = None
        self._seeds = np.random.default_rng(seed)
        self._ids = itertools.count()

    def job(self, prompt_token_ids: Sequence[int], params: SamplingParams, prompt: str | None) -> Job:
        """A job with an id of its own. ``UserError`` for a prompt or parameters that cannot be served."""
        tokens = self._checked_prompt(prompt_token_ids)
        room = self.max_model_len - len(tokens)
        if params.stop and self.tokenizer is None:
            raise UserError("stop strings need a tokenizer, and this model has none: use stop_token_ids")
        self._check_biases(params)
        dealt = int(self._seeds.integers(2**63))
        return Job(
            request_id=str(next(self._ids)),
            prompt=prompt,
            prompt_token_ids=tokens,
            params=params,
            seed=dealt if params.seed is None else int(params.seed),
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            end_ids=(() if params.ignore_eos else self.eos_token_ids) + tuple(params.stop_token_ids or ()),
            new_text=partial(self._new_text, params),
            bad_words=self._bad_words(params),
            matcher=self._matcher(params),
        )

    def _new_text(self, params: SamplingParams) -> GeneratedText:
        detokenizer = NoText() if self.tokenizer is None else self.tokenizer.detokenizer()
        return GeneratedText(detokenizer, params.stop or ())

    def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Each word's tokens at the beginning of a text, and inside one if that is another token for it."""
        if not params.bad_words:
            return ()
        if self.tokenizer is None:
            raise UserError("bad_words need a tokenizer, and this model has none: use logit_bias")
        found = []
        for word in params.bad_words:
            bare, inside = (
                tuple(self.tokenizer.encode(space + word.lstrip(), add_special_tokens=False))
                for space in ("", " ")
            )
            found.append(bare)
            if len(inside) == len(bare) and inside[0] != bare[0]:
                found.append(inside)
        return tuple(found)

    def _matcher(self, params: SamplingParams) -> Matcher | None:
        if params.structured_outputs is None:
            return None
        if self.tokenizer is None:
            raise UserError("structured_outputs need a tokenizer, and this model has none")
        if self._grammars is None:
            self._grammars = Grammars(self.tokenizer, self.vocab_size, self.eos_token_ids)
        return self._grammars.matcher(params.structured_outputs)

    def _check_biases(self, params: SamplingParams) -> None:
        outside = [token for token in params.logit_bias or () if token >= self.vocab_size]
        if outside:
            raise UserError(
                f"logit_bias token {outside[0]} is not in the vocabulary (0 … {self.vocab_size - 1}): leave it out"
            )

    def _checked_prompt(self, prompt_token_ids: Sequence[int]) -> tuple[int, ...]:
        tokens = tuple(prompt_token_ids)
        if not tokens:
            raise UserError("the prompt is empty: give at least one token")
        for token in tokens:
            if isinstance(token, bool) or not isinstance(token, int | np.integer):
                raise UserError(f"prompt token id {token!r} is not a whole number")
            if not 0 <= token < self.vocab_size:
                raise UserError(
                    f"prompt token id {token} is not in the vocabulary (0 … {self.vocab_size - 1}): "
                    "was the prompt tokenised for another model?"
                )
        if len(tokens) >= self.max_model_len:
            raise UserError(
                f"the prompt has {len(tokens)} tokens, the model's length is {self.max_model_len} and at least "
                "one token is to be generated: shorten the prompt or raise max_model_len"
            )
        return tuple(int(token) for token in tokens)
