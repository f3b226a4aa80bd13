"""Output that follows a JSON schema, a regular expression, a choice or a grammar: which tokens may come next,
as bits.

Knows the grammar library (llguidance) and a tokenizer; nothing of models, batches or devices.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from jaxlamina.errors import UserError, contained

if TYPE_CHECKING:
    import numpy as np

# Between items there is what models write, and nowhere else any blank: a small model may well never stop
# writing blanks.
_JSON_FORM: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
MAX_GRAMMAR = 2**16  # characters
# What the library may spend on expressions: a fifth of its own limit, so that `(a{1000}){1000}` takes 0.16 s
# where it took 1.5 s, and more for what is long itself.
_LEXER_FUEL, _FUEL_PER_BYTE, _MOST_FUEL = 200_000, 8, 2_000_000
_SLOWEST_MASK_S = (
    0.1  # of a thread's own time. A mask takes less than a millisecond, and everybody waits for it
)
# Keys of a schema under which there are values, and those under which schemas have names.
_VALUES = ("const", "enum", "default", "examples")
_NAMED = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
# How far a bound is moved that the library would not keep to: relative to it, or from 0. The library reads
# numbers a bit less exactly than they are written. Above 2**47 the next whole number is too near.
_MOVED, _MOVED_FROM_0, _LARGEST_MOVED = 2.0**-48, 1e-16, 2**47


@dataclass(frozen=True)
class StructuredOutputs:
    """What all of the output must be: exactly one of these, or ``UserError``. Names are vLLM's.

    - ``json``: a JSON schema, as a mapping or its text. Items are parted by ``", "``, keys by ``": "``.
    - ``regex``: a regular expression that the whole output matches; no look-around, no back-references.
    - ``choice``: one of these strings.
    - ``grammar``: a context-free grammar, in Lark's form with a rule ``start``, or in GBNF (``root ::= …``).
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        if [self.json, self.regex, self.choice, self.grammar].count(None) != 3:
            raise UserError("structured_outputs must have one of json, regex, choice and grammar")
        if self.json is not None:
            self._check_schema()
        if not isinstance(self.regex, str | None):
            raise UserError(f"structured_outputs.regex={self.regex!r:.80} must be a string")
        if not isinstance(self.grammar, str | None) or len(self.grammar or "") > MAX_GRAMMAR:
            raise UserError(
                f"structured_outputs.grammar={self.grammar!r:.80} must be a string of at most {MAX_GRAMMAR} "
                f"characters"
            )
        if self.choice is not None:
            given = isinstance(self.choice, list | tuple) and all(
                isinstance(c, str) and c for c in self.choice
            )
            if not given or not self.choice:
                raise UserError(
                    f"structured_outputs.choice={self.choice!r:.80} must be a list of strings that are not "
                    f"empty"
                )
        texts = {
            "regex": self.regex or "",
            "grammar": self.grammar or "",
            "choice": "".join(self.choice or ()),
        }
        for name, text in texts.items():
            if any("\ud800" <= character <= "\udfff" for character in text):
                raise UserError(
                    f"structured_outputs.{name} has characters that are not valid Unicode (lone surrogates)"
                )

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> StructuredOutputs:
        """From a mapping of the names above to values, as users write it."""
        unknown = sorted(fields.keys() - {"json", "regex", "choice", "grammar"})
        if unknown:
            raise UserError(
                f"structured_outputs.{unknown[0]:.40} is not supported: give json, regex, choice or grammar"
            )
        return cls(**fields)

    @property
    def kind(self) -> str:
        """The name of the one that is given."""
        return next(
            name for name in ("json", "regex", "choice", "grammar") if getattr(self, name) is not None
        )

    def _check_schema(self) -> None:
        try:
            schema = json.loads(self.json) if isinstance(self.json, str) else self.json
            if not isinstance(schema, Mapping):
                raise UserError(
                    f"structured_outputs.json={self.json!r:.80} must be a JSON schema: an object or its text"
                )
            assert self.schema_text is not None
        except UserError:
            raise
        except RecursionError:
            raise UserError("structured_outputs.json is nested too deeply: give a flatter schema") from None
        except (ValueError, TypeError) as error:
            raise UserError(f"structured_outputs.json is not JSON ({error}): give a schema's text") from None

    @cached_property
    def schema_text(self) -> str | None:
        """``json`` as text, or None. Numbers of any size are in it as they were written."""
        return self.json if self.json is None or isinstance(self.json, str) else json.dumps(dict(self.json))

    @property
    def n_bytes(self) -> int:
        """How long what is asked for is, as text."""
        if self.choice is not None:
            return sum(len(choice.encode()) + 1 for choice in self.choice)
        text = self.regex or self.grammar or self.schema_text or ""
        return len(text.encode("utf-8", "surrogatepass"))


def n_mask_words(vocab_size: int) -> int:
    """Words of 32 bits that say of each token whether it may come next."""
    return -(-vocab_size // 32)


class Matcher:
    """Where one output is in its grammar. ``vocab_size``: the model's."""

    def __init__(self, inner: Any, vocab_size: int) -> None:
        self._inner, self._vocab_size = inner, vocab_size

    def mask(self) -> np.ndarray:
        """[ceil(V/32)] uint32: bit t % 32 of word t // 32 says whether token t may come next. An
        end-of-sequence token may where the output is complete. ``UserError`` if that took so long that all
        others had to wait."""
        began = time.thread_time()
        import numpy as np

        # The library has a bit more than there are tokens, which may be in a word of its own.
        bits = np.frombuffer(self._inner.compute_bitmask(), np.uint32)[: n_mask_words(self._vocab_size)]
        if time.thread_time() - began > _SLOWEST_MASK_S:
            raise UserError("structured_outputs take too long to follow: ask for something simpler")
        return bits

    def accept(self, token: int) -> Literal["stop", "abort"] | None:
        """Takes in a token: "stop" if nothing can come after it, "abort" if the grammar outgrew the library's
        limits."""
        self._inner.consume_token(token)
        if self._inner.is_error():
            return "abort"
        return "stop" if self._inner.is_stopped() else None

    def copy(self) -> Matcher:
        return Matcher(self._inner.deep_copy(), self._vocab_size)


class Grammars:
    """Makes matchers for one tokenizer (`jaxlamina.text.tokenizer.Tokenizer`) and a model of ``vocab_size``
    tokens.

    ``UserError`` where the library is not installed or cannot read the tokenizer.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        try:
            import llguidance
        except ImportError:
            raise UserError(
                "structured_outputs need llguidance: pip install 'jaxlamina[structured]'"
            ) from None
        self._vocab_size = vocab_size
        self._matcher = llguidance.LLMatcher
        self._grammar_from = llguidance.grammar_from
        self._limits = llguidance.LLParserLimits
        try:
            text = tokenizer.to_json()
            self._tokenizer = llguidance.LLTokenizer(text, vocab_size, list(eos_token_ids) or None)
        except Exception as error:  # noqa: BLE001 (the library raises nothing more precise)
            raise UserError(f"structured_outputs do not work with this tokenizer ({_line(error)})") from None

    def matcher(self, asked: StructuredOutputs) -> Matcher:
        """One at the beginning of its output; any thread may ask. ``UserError`` for what the library does not
        take.

        The library lets other threads run meanwhile. The first mask is made here, since it takes the longest.
        """
        why: Any = None
        try:
            fuel = min(_MOST_FUEL, _LEXER_FUEL + _FUEL_PER_BYTE * asked.n_bytes)
            limits = self._limits(initial_lexer_fuel=fuel)
            inner = self._matcher(self._tokenizer, self._grammar(asked), log_level=0, limits=limits)
            if not inner.is_error():
                inner.compute_bitmask()
            if inner.is_error():
                why = inner.get_error()
        except BaseException as error:  # noqa: BLE001 (a panic of the library's is no Exception)
            why = contained(error)
        if why is not None:
            raise UserError(f"structured_outputs.{asked.kind} cannot be followed: {_line(why)}")
        return Matcher(inner, self._vocab_size)

    def _grammar(self, asked: StructuredOutputs) -> str:
        if asked.regex is not None:
            return self._matcher.grammar_from_regex(asked.regex)
        if (
            asked.choice is not None
        ):  # as one expression: 100,000 alternatives of a grammar take half a minute
            return self._matcher.grammar_from_regex("|".join(map(_literally, asked.choice)))
        if asked.grammar is not None:
            return str(self._grammar_from("grammar", asked.grammar))
        schema = asked.schema_text
        assert schema is not None
        # As text: the library's way from Python's values refuses integers of more than 64 bits.
        bounded = json.dumps(each_schema(json.loads(schema), _bounded))
        return self._matcher.grammar_from_json_schema(bounded, overrides=_JSON_FORM)


def each_schema(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """``schema`` (JSON) with what ``change`` makes of it and of each schema within it."""
    if isinstance(schema, list):
        return [each_schema(x, change) for x in schema]
    if not isinstance(schema, dict):
        return schema
    found = dict(schema)
    for key in schema.keys() - {*_VALUES}:
        value = schema[key]
        if key in _NAMED and isinstance(value, dict):
            found[key] = {name: each_schema(x, change) for name, x in value.items()}
        else:
            found[key] = each_schema(value, change)
    return change(found)


def _bounded(schema: dict[str, Any]) -> dict[str, Any]:
    """``schema`` with bounds that the library keeps to. To it 0 is in (0, 0.5], as is any whole number that a
    range leaves out at its end nearer to 0, where the range is shorter than 1."""
    found = dict(schema)
    for key, sign in (("exclusiveMinimum", 1), ("exclusiveMaximum", -1)):
        bound: Any = found.get(key)
        if type(bound) in (int, float) and 0 <= sign * bound < _LARGEST_MOVED and bound == int(bound):
            found[key] = bound * (1 + _MOVED) or sign * _MOVED_FROM_0
    return found


def _literally(text: str) -> str:
    """A regular expression for this text alone."""
    return "".join(c if c.isalnum() else f"\\x{{{ord(c):X}}}" for c in text)


def _line(error: object) -> str:
    return " ".join(str(error).split())[:200]
