"""From a prompt and its parameters to a job: what is checked when a request is queued.

Knows the vocabulary, the model's length and a tokenizer; nothing of slots, scheduling or devices.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np

from jaxlamina.engine.live_request import LiveRequest
from jaxlamina.errors import UserError
from jaxlamina.sampling.adjustments import mask_of
from jaxlamina.sampling.params import SamplingParams
from jaxlamina.sampling.structured import Grammars, Matcher
from jaxlamina.text.generated import GeneratedText, NoText


class Admission:
    """Makes jobs, in any thread. ``seed``: requests without a seed of their own get theirs from it.
    ``longer``: what would let longer prompts in, for the error of one that is too long."""

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
        self.longer = ""
        self.eos_token_ids = tuple(eos_token_ids)
        self._grammars: Grammars | None = None
        self._seeds = np.random.default_rng(seed)
        self._ids = itertools.count()
        self._dealing, self._reading = threading.Lock(), threading.Lock()

    def job(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        prompt: str | None,
        matcher: Matcher | None = None,
        seed: int | None = None,
    ) -> LiveRequest:
        """A job with an id of its own. ``UserError`` for a prompt or parameters that cannot be served.

        ``matcher``: what `matcher` gave for ``params``, of which several jobs may have the same; None: it is
        made here. ``seed``: in place of a dealt one, where ``params`` have none.
        """
        tokens = self._checked_prompt(params.kept(prompt_token_ids, self.max_model_len))
        room = self.max_model_len - len(tokens)
        if params.stop and self.tokenizer is None:
            raise UserError("stop strings need a tokenizer, and this model has none: use stop_token_ids")
        self._check_biases(params)
        ends = (() if params.ignore_eos else self.eos_token_ids) + tuple(params.stop_token_ids or ())
        bad_words = self._bad_words(params)
        matcher = matcher or self.matcher(params)
        with self._dealing:
            request_id, dealt = str(next(self._ids)), int(self._seeds.integers(2**63))
        dealt = dealt if seed is None else seed
        return LiveRequest(
            request_id=request_id,
            prompt=prompt,
            prompt_token_ids=tokens,
            params=params,
            seed=dealt if params.seed is None else int(params.seed),
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            end_ids=ends,
            new_text=partial(self._new_text, params, tokens),
            bad_words=bad_words,
            allowed=self._allowed(params, ends if params.min_tokens else (), bad_words),
            matcher=matcher,
        )

    def _new_text(self, params: SamplingParams, prompt: Sequence[int]) -> GeneratedText:
        if self.tokenizer is None:
            return GeneratedText(NoText())
        detokenizer = self.tokenizer.detokenizer(
            params.skip_special_tokens, params.spaces_between_special_tokens, after=prompt
        )
        return GeneratedText(detokenizer, params.stop or (), include_stop=params.include_stop_str_in_output)

    def _allowed(
        self, params: SamplingParams, ends: Sequence[int], bad_words: Sequence[Sequence[int]]
    ) -> np.ndarray | None:
        """The mask of ``allowed_token_ids``. ``UserError`` if tokens that may be banned later are all there
        are."""
        if params.allowed_token_ids is None:
            return None
        outside = max(params.allowed_token_ids)
        if outside >= self.vocab_size:
            raise UserError(
                f"allowed_token_ids={outside} is not in the vocabulary (0 … {self.vocab_size - 1}): leave "
                f"it out"
            )
        mask = mask_of(params.allowed_token_ids, self.vocab_size)
        banned = {token for token in (*ends, *(word[-1] for word in bad_words)) if token < self.vocab_size}
        if not np.any(mask & ~mask_of(banned, self.vocab_size)):
            raise UserError(
                "allowed_token_ids=… may leave no token beside min_tokens and bad_words: allow more"
            )
        return mask

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
            if not bare:
                raise UserError(f"bad_words {word!r:.40} is no token of this model's: leave it out")
            found.append(bare)
            if len(inside) == len(bare) and inside[0] != bare[0]:
                found.append(inside)
        return tuple(found)

    def matcher(self, params: SamplingParams) -> Matcher | None:
        """For outputs that must follow something, what says which tokens may come; this may take seconds."""
        if params.structured_outputs is None:
            return None
        if self.tokenizer is None:
            raise UserError("structured_outputs need a tokenizer, and this model has none")
        with self._reading:
            if self._grammars is None:
                self._grammars = Grammars(self.tokenizer, self.vocab_size, self.eos_token_ids)
        return self._grammars.matcher(params.structured_outputs)

    def _check_biases(self, params: SamplingParams) -> None:
        outside = [token for token in params.logit_bias or () if token >= self.vocab_size]
        if outside:
            raise UserError(
                f"logit_bias token {outside[0]} is not in the vocabulary (0 … {self.vocab_size - 1}): leave "
                f"it out"
            )

    def _checked_prompt(self, prompt_token_ids: Sequence[int]) -> tuple[int, ...]:
        if hasattr(prompt_token_ids, "__array__"):  # of numpy or JAX, or a 0-dimensional one
            prompt_token_ids = np.asarray(prompt_token_ids).tolist()
        if not isinstance(prompt_token_ids, Iterable):
            raise UserError(f"a prompt's token ids must be a list of them, not {prompt_token_ids!r:.80}")
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
                f"the prompt has {len(tokens)} tokens, the model's length is {self.max_model_len} and at "
                f"least one token is to be generated: shorten the prompt{self.longer}"
            )
        return tuple(int(token) for token in tokens)
