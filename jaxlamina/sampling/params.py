"""How one request is continued: its sampling parameters, checked. Plain numbers; knows no logits and no
batch."""

from __future__ import annotations

import json
import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jaxlamina.errors import UserError
from jaxlamina.options import option
from jaxlamina.sampling.structured import StructuredOutputs

_INT32 = 2**31 - 1  # the largest number that arrays of a step hold
# Below it a draw is the likeliest token anyway; and logits divided by far smaller numbers overflow float32.
LEAST_TEMPERATURE = 1e-6
MAX_SEQUENCES = 1024  # of one request
MAX_LENGTH_PENALTY = 10.0  # tokens to the power of it must be a number
MAX_LOGPROBS = 20
MAX_LOGIT_BIASES = 300
MAX_ALLOWED_TOKENS = 2**18  # of a request: as large as vocabularies are


def _biases(given: Sequence[str]) -> dict[int, float]:
    try:
        return {int(token): float(bias) for token, _, bias in (pair.partition("=") for pair in given)}
    except ValueError:
        raise UserError(f"--logit-bias {' '.join(given)} must be TOKEN=BIAS each, as 198=-100") from None


def _structured(given: str) -> StructuredOutputs:
    try:
        asked = json.loads(given)
    except ValueError:
        asked = None
    if not isinstance(asked, dict):
        raise UserError(
            f"--structured-outputs {given:.80} must be a JSON object with one of json, regex and choice"
        )
    return StructuredOutputs.of(asked)


@dataclass(frozen=True)
class SamplingParams:
    """How one request is continued. Names and defaults are vLLM's. ``UserError`` on a value out of range.

    - ``max_tokens``: generate at most so many; None: up to the model's length.
    - ``min_tokens``: no end-of-sequence token, stop token or stop string before so many.
    - ``temperature``: 0, or less than 1e-6, takes the likeliest token; otherwise logits are divided by it.
    - ``min_p``: keep tokens at least this fraction as likely as the likeliest; then
      ``top_k``: keep the k likeliest (0 or -1: all); then
      ``top_p``: keep the fewest likeliest ones whose probabilities add up to it.
      Tokens exactly as likely as the last one kept are kept too.
    - ``presence_penalty``: taken off the logits of tokens written before; ``frequency_penalty``: taken off as
      often as they were written. Both -2 … 2. ``repetition_penalty``: positive logits of tokens in the prompt
      or written before are divided by it, negative ones multiplied. Logits are changed so before all else,
      greedy choice included.
    - ``logit_bias``: token id to what is added to its logit, -100 … 100, before penalties.
    - ``allowed_token_ids``: the only tokens that are written; end-of-sequence tokens are none of them unless
      named.
    - ``bad_words``: strings that are not written: the last of a word's tokens is not taken after the others.
    - ``structured_outputs``: a `StructuredOutputs` that all of the output follows. It ends where nothing can
      follow, or at an end-of-sequence token.
    - ``seed``: same seed, same prompt, same tokens; None: the engine deals one.
    - ``stop``: strings that end the text (left out of it); ``stop_token_ids``: tokens that do.
      ``include_stop_str_in_output``: neither is left out.
    - ``skip_special_tokens``: text is without special tokens' names. ``spaces_between_special_tokens``: False
      leaves out the blanks that some tokenizers put between two of them.
    - ``truncate_prompt_tokens``: only so many tokens of the prompt's end are taken; -1: as many as there is
      room for.
    - ``ignore_eos``: go on after the model's end-of-sequence token.
    - ``logprobs``: None, or how many of the likeliest tokens to report beside the chosen one.
    - ``prompt_logprobs``: the same of each prompt token but the first. All of the prompt is computed then,
      whatever the prefix cache has of it, in chunks of at most 512 tokens.
    - ``n``: give so many continuations; ``best_of``: draw so many (default ``n``) and give the ``n`` of them
      with the highest cumulative log-probability, best first. The prompt is computed and kept once.
    - ``use_beam_search``: no drawing: keep the ``beam_width`` (default ``best_of``) likeliest continuations a
      step and give the best ``n``, by cumulative log-probability / (tokens, prompt included, end-of-sequence
      token not) ** ``length_penalty``. Takes ``temperature`` 0.
    """

    max_tokens: int | None = option(16, "Write at most so many tokens.")
    min_tokens: int = option(0, "Do not stop before so many tokens.")
    temperature: float = option(1.0, "0 takes the likeliest token; 1 samples.")
    top_p: float = option(1.0, "Keep the likeliest tokens that add up to this much.")
    top_k: int = option(0, "Keep the k likeliest tokens; 0 keeps all.")
    min_p: float = option(0.0, "Keep tokens this likely, relative to the likeliest.")
    presence_penalty: float = option(0.0, "Taken off the logits of tokens that were written before, -2 to 2.")
    frequency_penalty: float = option(0.0, "Taken off as often as a token was written before, -2 to 2.")
    repetition_penalty: float = option(
        1.0, "Above 1: tokens of the prompt and those written before are less likely."
    )
    logit_bias: Mapping[int, float] | None = option(
        None,
        "Added to a token id's logit; may be repeated.",
        flag_type=list[str],
        read=_biases,
        metavar="TOKEN=BIAS",
    )
    allowed_token_ids: Sequence[int] | None = option(
        None,
        "A token id that may be written, and no other; may be repeated.",
        flag="--allowed-token-id",
        flag_type=list[int],
    )
    bad_words: Sequence[str] | None = option(
        None, "A string that is not to be written; may be repeated.", flag_type=list[str]
    )
    structured_outputs: StructuredOutputs | None = option(
        None,
        '{"json": SCHEMA}, {"regex": …}, {"choice": […]} or {"grammar": …}: what all of a text must be.',
        flag_type=str,
        read=_structured,
        metavar="JSON",
    )
    seed: int | None = option(None, "Same seed, same prompt, same text.")
    stop: str | Sequence[str] | None = option(
        None, "A string that ends the text; may be repeated.", flag_type=list[str]
    )
    stop_token_ids: Sequence[int] | None = option(
        None, "A token id that ends the text; may be repeated.", flag="--stop-token-id", flag_type=list[int]
    )
    include_stop_str_in_output: bool = option(
        False, "Do not leave it out of the text.", flag="--include-stop-str-in-output"
    )
    ignore_eos: bool = option(False, "Go on after the end-of-text token.", flag="--ignore-eos")
    skip_special_tokens: bool = option(True, "Leave special tokens' names out of the text.")
    spaces_between_special_tokens: bool = option(True, "Where the tokenizer puts blanks between them.")
    truncate_prompt_tokens: int | None = option(
        None, "Take so many tokens of a prompt's end; -1: as many as there is room for."
    )
    logprobs: int | None = option(None, "With --json: log-probabilities of each token and so many rivals.")
    prompt_logprobs: int | None = option(None, "With --json: the same of each prompt token but the first.")
    n: int = option(1, "Write so many continuations of each prompt.")
    best_of: int | None = option(None, "Draw so many and show the --n likeliest of them; default: as many.")
    use_beam_search: bool = option(
        False, "Search for the likeliest text instead of drawing.", flag="--use-beam-search"
    )
    beam_width: int | None = option(None, "Beam search with so many beams; default: --best-of, or --n.")
    length_penalty: float = option(1.0, "Beam search: above 0 favours longer texts, below 0 shorter ones.")

    @classmethod
    def of_flags(cls, **given: Any) -> SamplingParams:
        """From a command line, where a beam width asks for beam search."""
        searches = given["use_beam_search"] or given["beam_width"] is not None
        return cls(**given | {"use_beam_search": searches})

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            _require_int(self.max_tokens, "max_tokens", 1, None, " or None (up to the model's length)")
        _require_int(self.min_tokens, "min_tokens", 0, self.max_tokens)
        _require_number(self.temperature, "temperature", 0.0, None, "; 0 is greedy")
        _require_number(self.top_p, "top_p", 0.0, 1.0, "; 1 keeps all tokens", above_low=True)
        _require_int(self.top_k, "top_k", -1, _INT32, "; 0 and -1 keep all tokens")
        _require_number(self.min_p, "min_p", 0.0, 1.0, "; 0 keeps all tokens")
        self._check_adjustments()
        if self.seed is not None:
            _require_int(self.seed, "seed", 0, 2**64 - 1, " or None")
        for name in ("logprobs", "prompt_logprobs"):
            if (asked := getattr(self, name)) is not None:
                _require_int(asked, name, 0, MAX_LOGPROBS, f" or None (no {name})")
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise UserError(f"{name}={getattr(self, name)!r} must be True or False")
        kept = self.truncate_prompt_tokens
        if kept is not None and (kept == 0 or isinstance(kept, bool)):
            raise UserError(
                f"truncate_prompt_tokens={kept} must be -1 (as many as there is room for) or at least 1"
            )
        if kept is not None:
            _require_int(kept, "truncate_prompt_tokens", -1, _INT32, " or None")
        if not isinstance(self.stop, str | list | tuple | None):
            raise UserError(f"stop={self.stop!r} must be a non-empty string or a list of such")
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if not all(isinstance(s, str) and s for s in stop):
            raise UserError(f"stop={self.stop!r} must be a non-empty string or a list of such")
        object.__setattr__(self, "stop", stop)
        if isinstance(self.stop_token_ids, int | str):
            raise UserError(f"stop_token_ids={self.stop_token_ids!r} must be a list of token ids")
        ids = () if self.stop_token_ids is None else tuple(self.stop_token_ids)
        object.__setattr__(self, "stop_token_ids", ids)
        for token in ids:
            _require_int(token, "stop_token_ids", 0, _INT32)
        self._check_sequences()

    def _check_adjustments(self) -> None:
        _require_number(self.presence_penalty, "presence_penalty", -2.0, 2.0)
        _require_number(self.frequency_penalty, "frequency_penalty", -2.0, 2.0)
        _require_number(
            self.repetition_penalty, "repetition_penalty", 0.0, None, "; 1 is none", above_low=True
        )
        if not isinstance(self.logit_bias, Mapping | None):
            raise UserError(f"logit_bias={self.logit_bias!r:.80} must map token ids to numbers")
        biases = dict(self.logit_bias or {})
        if len(biases) > MAX_LOGIT_BIASES:
            raise UserError(f"logit_bias has {len(biases)} tokens: at most {MAX_LOGIT_BIASES} are taken")
        for token, bias in biases.items():
            _require_int(token, "logit_bias token", 0, None)
            _require_number(bias, f"logit_bias[{token}]", -100.0, 100.0)
        object.__setattr__(self, "logit_bias", biases or None)
        self._check_allowed()
        words = self.bad_words
        given = isinstance(words, list | tuple | None) and all(
            isinstance(w, str) and w.strip() for w in words or ()
        )
        if not given:
            raise UserError(f"bad_words={words!r:.80} must be a list of strings that are not blank")
        object.__setattr__(self, "bad_words", tuple(words or ()))
        if not isinstance(self.structured_outputs, StructuredOutputs | None):
            raise UserError(f"structured_outputs={self.structured_outputs!r:.80} must be a StructuredOutputs")
        if self.structured_outputs is not None and (self.min_tokens or self.bad_words):
            raise UserError(
                "min_tokens and bad_words may leave no token that structured_outputs allow: leave them out"
            )

    def _check_allowed(self) -> None:
        if self.allowed_token_ids is None:
            return
        given = (
            () if isinstance(self.allowed_token_ids, int | str | Mapping) else tuple(self.allowed_token_ids)
        )
        if not 0 < len(given) <= MAX_ALLOWED_TOKENS:
            raise UserError(f"allowed_token_ids must be a list of token ids, one to {MAX_ALLOWED_TOKENS}")
        if not all(type(token) is int for token in given) or min(given) < 0 or max(given) > _INT32:
            for token in given:  # says which; one by one is slow
                _require_int(token, "allowed_token_ids", 0, _INT32)
        object.__setattr__(self, "allowed_token_ids", given)
        if self.structured_outputs is not None:
            raise UserError(
                "allowed_token_ids may leave no token that structured_outputs allow: give one of the two"
            )

    def _check_sequences(self) -> None:
        _require_int(self.n, "n", 1, MAX_SEQUENCES)
        if self.best_of is not None:
            _require_int(self.best_of, "best_of", self.n, MAX_SEQUENCES, f" (n={self.n}) or None")
        if self.beam_width is not None:
            _require_int(self.beam_width, "beam_width", self.n, MAX_SEQUENCES, f" (n={self.n}) or None")
        if not isinstance(self.use_beam_search, bool):
            raise UserError(f"use_beam_search={self.use_beam_search!r} must be True or False")
        _require_number(self.length_penalty, "length_penalty", -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)
        if self.use_beam_search:
            self._check_beam_search()
            return
        if self.beam_width is not None or self.length_penalty != 1.0:
            name = "length_penalty" if self.beam_width is None else "beam_width"
            raise UserError(
                f"{name}={getattr(self, name)} is for beam search alone: set use_beam_search=True"
            )
        if self.n_sequences > 1 and self.greedy:
            raise UserError(
                f"n={self.n}, best_of={self.best_of} with temperature={self.temperature:g} would write the "
                f"same text {self.n_sequences} times: set a temperature of at least {LEAST_TEMPERATURE}, or "
                "use_beam_search=True"
            )

    def _check_beam_search(self) -> None:
        if None not in (self.best_of, self.beam_width) and self.best_of != self.beam_width:
            raise UserError(
                f"best_of={self.best_of} and beam_width={self.beam_width} mean the same: give one of them"
            )
        if not self.greedy or self.filters:
            raise UserError(
                f"temperature={self.temperature}, top_p={self.top_p}, top_k={self.top_k}, "
                f"min_p={self.min_p}: beam "
                "search draws nothing, so it takes temperature=0, and top_p, top_k and min_p left out"
            )
        if self.adjusts:
            raise UserError(
                "beam search takes the model's own probabilities: leave out presence_penalty, "
                "frequency_penalty, "
                "repetition_penalty, logit_bias, allowed_token_ids, bad_words and structured_outputs"
            )
        if self.stop:
            raise UserError(f"stop={self.stop!r}: beam search ends at tokens only, use stop_token_ids")

    @cached_property
    def n_sequences(self) -> int:
        """How many sequences are written at once for the prompt."""
        return (self.beam_width if self.use_beam_search else None) or self.best_of or self.n

    @cached_property
    def chosen_at_end(self) -> bool:
        """Whether only the end shows which sequences are given: then none is streamed."""
        return self.use_beam_search or self.n_sequences > self.n

    @cached_property
    def needed_logprobs(self) -> int | None:
        """``logprobs``, or 0 where sequences are ranked by the log-probability of their own tokens."""
        return 0 if self.logprobs is None and self.chosen_at_end else self.logprobs

    @cached_property
    def greedy(self) -> bool:
        return self.temperature < LEAST_TEMPERATURE

    @cached_property
    def penalises(self) -> bool:
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0, 0, 1)

    @cached_property
    def adjusts(self) -> bool:
        """Whether logits are changed before anything is done with them."""
        return self.penalises or bool(
            self.logit_bias or self.bad_words or self.structured_outputs or self.allowed_token_ids
        )

    def kept(self, prompt_token_ids: Sequence[int], max_model_len: int) -> Sequence[int]:
        """The tokens of a prompt that ``truncate_prompt_tokens`` leaves for a model of ``max_model_len``
        tokens. `UserError` if it asks for more than such a model has room for."""
        if self.truncate_prompt_tokens is None:
            return prompt_token_ids
        room = max(1, max_model_len - (1 if self.max_tokens is None else self.max_tokens))
        if self.truncate_prompt_tokens > max_model_len:
            raise UserError(
                f"truncate_prompt_tokens={self.truncate_prompt_tokens} is more than the model's length, "
                f"{max_model_len}"
            )
        n = room if self.truncate_prompt_tokens == -1 else self.truncate_prompt_tokens
        return prompt_token_ids[-n:]

    @cached_property
    def filters(self) -> bool:
        """Whether any of top_k, top_p and min_p leaves tokens out."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


_FLAGS = (
    *("ignore_eos", "skip_special_tokens", "spaces_between_special_tokens"),
    "include_stop_str_in_output",
)


def _range_text(low: float, high: float | None, above_low: bool = False) -> str:
    if low == -math.inf:
        return "that is finite"
    least = f"above {low}" if above_low else f"at least {low}"
    return least if high is None else f"{least} and at most {high}"


def _require_int(value: object, name: str, low: int, high: int | None, more: str = "") -> None:
    ok = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not ok or value < low or (high is not None and value > high):  # type: ignore[operator]
        raise UserError(f"{name}={value!r} must be a whole number {_range_text(low, high)}{more}")


def _require_number(
    value: object, name: str, low: float, high: float | None, more: str = "", above_low: bool = False
) -> None:
    ok = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if ok:
        ok = math.isfinite(value) and value >= low  # type: ignore[arg-type,operator]
        ok = ok and not (above_low and value == low) and (high is None or value <= high)  # type: ignore[operator]
    if not ok:
        raise UserError(f"{name}={value!r} must be a number {_range_text(low, high, above_low)}{more}")


def seed_of(seed: int, index: int) -> int:
    """The seed, 0 … 2**64 - 1, of a request's sequence ``index``: the request's own for the first."""
    import numpy as np  # not for a command line that is only to show its help

    return int(np.random.SeedSequence((seed, index)).generate_state(1, np.uint64)[0]) if index else int(seed)
