"""Output that follows a JSON schema, a regular expression or a choice: which tokens may come next, as bits.

Knows the grammar library (llguidance) and a tokenizer; nothing of models, batches or devices.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from jaxlamina.errors import UserError

# Between items there is what models write, and nowhere else any blank: a small model may well never stop writing blanks.
_JSON_FORM: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(frozen=True)
class StructuredOutputs:
    """What all of the output must be: exactly one of these, or ``UserError``. Names are vLLM's.

    - ``json``: a JSON schema, as a mapping or its text. Items are parted by ``", "``, keys by ``": "``.
    - ``regex``: a regular expression that the whole output matches; no look-around, no back-references.
    - ``choice``: one of these strings.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if [self.json, self.regex, self.choice].count(None) != 2:
            raise UserError("structured_outputs must have one of json, regex and choice")
        if not isinstance(self.schema, Mapping | None):
            raise UserError(
                f"structured_outputs.json={self.json!r:.80} must be a JSON schema: an object or its text"
            )
        if not isinstance(self.regex, str | None):
            raise UserError(f"structured_outputs.regex={self.regex!r:.80} must be a string")
        if self.choice is not None:
            given = isinstance(self.choice, list | tuple) and all(
                isinstance(c, str) and c for c in self.choice
            )
            if not given or not self.choice:
                raise UserError(
                    f"structured_outputs.choice={self.choice!r:.80} must be a list of strings that are not empty"
                )

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> StructuredOutputs:
        """From a mapping of the names above to values, as users write it."""
        unknown = sorted(fields.keys() - {"json", "regex", "choice"})
        if unknown:
            raise UserError(
                f"structured_outputs.{unknown[0]:.40} is not supported: give json, regex or choice"
            )
        return cls(**fields)

    @property
    def schema(self) -> Any:
        """``json`` as a value, or None."""
        if not isinstance(self.json, str):
            return self.json
        try:
            return json.loads(self.json)
        except ValueError as error:
            raise UserError(f"structured_outputs.json is not JSON ({error}): give a schema's text") from None


class Matcher:
    """Where one output is in its grammar."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def mask(self) -> np.ndarray:
        """[ceil(V/32)] uint32: bit t % 32 of word t // 32 says whether token t may come next. An end-of-sequence token
        may where the output is complete."""
        return np.frombuffer(self._inner.compute_bitmask(), np.uint32)

    def accept(self, token: int) -> Literal["stop", "abort"] | None:
        """Takes in a token: "stop" if nothing can come after it, "abort" if the grammar outgrew the library's limits."""
        self._inner.consume_token(token)
        if self._inner.is_error():
            return "abort"
        return "stop" if self._inner.is_stopped() else None

    def copy(self) -> Matcher:
        return Matcher(self._inner.deep_copy())


class Grammars:
    """Makes matchers for one tokenizer (`jaxlamina.tokenizer.Tokenizer`) and a model of ``vocab_size`` tokens.

    ``UserError`` where the library is not installed or cannot read the tokenizer.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        try:
            import llguidance
        except ImportError:
            raise UserError(
                "structured_outputs need llguidance: pip install 'jaxlamina[structured]'"
            ) from None
        self._matcher = llguidance.LLMatcher
        try:
            text = tokenizer.to_json()
            self._tokenizer = llguidance.LLTokenizer(text, vocab_size, list(eos_token_ids) or None)
        except Exception as error:  # noqa: BLE001 (the library raises nothing more precise)
            raise UserError(f"structured_outputs do not work with this tokenizer ({_line(error)})") from None

    def matcher(self, asked: StructuredOutputs) -> Matcher:
        """One at the beginning of its output. ``UserError`` for what the library does not take."""
        inner = self._matcher(self._tokenizer, self._grammar(asked), log_level=0)
        if inner.is_error():
            kind = "json" if asked.json is not None else "regex" if asked.regex is not None else "choice"
            raise UserError(f"structured_outputs.{kind} cannot be followed: {_line(inner.get_error())}")
        return Matcher(inner)

    def _grammar(self, asked: StructuredOutputs) -> str:
        if asked.regex is not None:
            return self._matcher.grammar_from_regex(asked.regex)
        if asked.choice is not None:
            choices = (json.dumps(choice, ensure_ascii=False) for choice in asked.choice)
            return self._matcher.grammar_from_lark("start: " + " | ".join(choices))
        return self._matcher.grammar_from_json_schema(dict(asked.schema), overrides=_JSON_FORM)


def _line(error: object) -> str:
    return " ".join(str(error).split())[:200]
