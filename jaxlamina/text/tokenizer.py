"""Text to token ids and back, and chats to prompts: a thin face over Hugging Face `tokenizers`.

Knows `tokenizer.json` and the small JSON files beside it. Rebuilding a tokenizer from GGUF metadata is
`weights/gguf_tokenizer.py`; what happens a token at a time is `detokenizer.py`. Knows nothing of models.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import tokenizers

from jaxlamina.errors import UserError
from jaxlamina.text.detokenizer import (
    ByteDetokenizer,
    IncrementalDetokenizer,
    TokenBytes,
    WholeTextDetokenizer,
    token_bytes,
)
from jaxlamina.text.template_process import render_bounded

TEMPLATE_FILE = "chat_template.jinja"
_LONG_TEXT = 4096  # as a batch, which lets other threads run meanwhile
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class Tokenizer:
    """One vocabulary with its chat template.

    `inner` encodes; `named_tokens` are strings such as `bos_token` for the template; `eos_token_ids` end a
    text.
    """

    def __init__(
        self,
        inner: tokenizers.Tokenizer,
        *,
        chat_template: str | None = None,
        named_tokens: Mapping[str, str] | None = None,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        # A tokenizer.json may ask for padding and cutting, which would silently lose part of a prompt.
        inner.no_padding()
        inner.no_truncation()
        self._inner = inner
        self.chat_template = chat_template
        self.named_tokens = dict(named_tokens or {})
        own = inner.token_to_id(self.named_tokens["eos_token"]) if "eos_token" in self.named_tokens else None
        self.eos_token_ids = tuple(dict.fromkeys([*eos_token_ids, *([] if own is None else [own])]))

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones too; a model's table may have more rows."""
        return self._inner.get_vocab_size(with_added_tokens=True)

    @property
    def bos_token_id(self) -> int | None:
        bos = self.named_tokens.get("bos_token")
        return None if bos is None else self._inner.token_to_id(bos)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids. `add_special_tokens` adds what the model wants around a text, such as BOS.

        Names of special tokens inside `text` become those tokens. A prompt from `apply_chat_template` has its
        own: encode it with add_special_tokens=False.
        """
        if not isinstance(text, str):
            raise UserError(f"a prompt must be a string, not {type(text).__name__}")
        try:
            if len(text) < _LONG_TEXT:
                return self._inner.encode(text, add_special_tokens=add_special_tokens).ids
            [found] = self._inner.encode_batch([text], add_special_tokens=add_special_tokens)
            return found.ids
        except (TypeError, UnicodeEncodeError):  # lone surrogates, which no UTF-8 has
            raise UserError(
                "the prompt has characters that are not valid Unicode (lone surrogates)"
            ) from None
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # Rust's, which is no `Exception`
                raise
            raise UserError(
                f"the model's tokenizer failed on the prompt ({str(error).partition(chr(10))[0][:120]}): "
                f"see whether its tokenizer.json is whole"
            ) from None

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`, bytes that are no UTF-8 as U+FFFD; always what a detokenizer streams from the
        start."""
        detokenizer = self.detokenizer(skip_special_tokens)
        return "".join([*map(detokenizer.add, ids), detokenizer.finish()])

    def detokenizer(
        self,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        after: Sequence[int] = (),
    ) -> IncrementalDetokenizer:
        """A fresh stream of text: `.add(token_id)` for each token, `.finish()` at the end.

        ``after``: tokens that stand before it, such as a prompt's. The blank that some tokenizers drop at the
        start of a text is kept behind them: the text of both is that of the one and then the other.
        ``spaces_between_special_tokens``: False leaves out the blanks that some decoders put between two
        special tokens.
        """
        if self._bytes is not None:  # these put none
            return ByteDetokenizer(self._bytes, skip_special_tokens, after)

        def decode(ids: list[int]) -> str:
            text: str = self._inner.decode(ids, skip_special_tokens=skip_special_tokens)
            if not (skip_special_tokens or spaces_between_special_tokens):
                for one, next_ in pairwise(self._special.get(i, "") for i in ids):
                    text = text.replace(f"{one} {next_}", one + next_) if one and next_ else text
            return text

        return WholeTextDetokenizer(decode, after)

    def token_bytes(self, token_id: int) -> bytes:
        """What one token adds inside a text: UTF-8, maybe part of a character; a special token's name."""
        if self._bytes is not None:
            return self._bytes.of_token(token_id)
        return self.decode([token_id], skip_special_tokens=False).encode()

    def is_special(self, token: str) -> bool:
        """Whether a text with ``skip_special_tokens`` is without ``token``."""
        return token in self._special.values()

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Of all those tokens."""
        return frozenset(self._special)

    @cached_property
    def _special(self) -> dict[int, str]:
        return {
            i: token.content for i, token in self._inner.get_added_tokens_decoder().items() if token.special
        }

    @cached_property
    def _bytes(self) -> TokenBytes | None:
        return token_bytes(self._inner)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        chat_template: str | None = None,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """The prompt for `messages`; `variables` (tools, documents, …) go to the template, the model's own or
        `chat_template`.

        `continue_final_message`: it ends with the last message's content, so that the model goes on with
        that, and `add_generation_prompt` must be false. Raises `UserError` if the model has no chat template,
        the template refuses the messages, or leaves out the one that is to be continued.
        """
        if continue_final_message and add_generation_prompt:
            raise UserError(
                "continue_final_message goes on with the last message, add_generation_prompt begins "
                "another: give one"
            )
        template = chat_template or self.chat_template
        if template is None:
            raise UserError(
                "this model has no chat template; use generate with a plain prompt instead of chat"
            )
        given = {"tools": None, "documents": None} | self.named_tokens | variables
        given["add_generation_prompt"] = add_generation_prompt
        if not (continue_final_message and messages and isinstance(messages[-1], Mapping)):
            return render_bounded(template, messages, given)
        *before, last = messages
        content = last.get("content") or ""
        if not isinstance(content, str):
            raise UserError("the last message cannot be continued: its content is no text")
        mark = uuid.uuid4().hex  # what follows it is the template's
        text = render_bounded(template, [*before, {**last, "content": content + mark}], given)
        if mark not in text:
            raise UserError("the chat template leaves out the last message, so it cannot be continued")
        return text[: text.rindex(mark)]

    def to_json(self) -> str:
        """What a tokenizer.json holds."""
        text: str = self._inner.to_str()
        return text

    def save(self, folder: Path) -> None:
        """tokenizer.json and tokenizer_config.json, as transformers reads them."""
        self._inner.save(str(folder / "tokenizer.json"))
        config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **self.named_tokens}
        config["clean_up_tokenization_spaces"] = False
        if self.chat_template is not None:
            config["chat_template"] = self.chat_template
        text = json.dumps(config, indent=2, ensure_ascii=False)
        (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def tokenizer_from_folder(folder: Path, eos_token_ids: Sequence[int] = ()) -> Tokenizer:
    """The tokenizer of a Hugging Face folder; `eos_token_ids` are the model config's.

    Reads tokenizer.json, tokenizer_config.json, special_tokens_map.json, chat_template.jinja and the end
    tokens of generation_config.json. Raises `UserError` if there is no tokenizer.json or a file is broken.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        if (folder / "tokenizer.model").is_file() or (folder / "vocab.json").is_file():
            raise UserError(
                f"{folder} has no tokenizer.json; make one with transformers: "
                "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
            )
        raise UserError(f"{folder} has no tokenizer.json; fetch it too, or give token ids instead of text")
    try:
        inner = tokenizers.Tokenizer.from_file(str(path))
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise UserError(
            f"{path} is not a tokenizer ({str(error).splitlines()[0][:120]}); fetch it again"
        ) from None
    config = _json(folder / "special_tokens_map.json") | _json(folder / "tokenizer_config.json")
    named = {name: text for name in _NAMED_TOKENS if (text := _token_text(config, name, folder)) is not None}
    template = folder / TEMPLATE_FILE
    if template.is_file():
        try:
            chosen: str | None = template.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{template} cannot be read ({error}); fetch it again") from None
    else:
        chosen = _template(config.get("chat_template"), folder)
    ends = [*eos_token_ids, *generation_eos_ids(folder)]
    return Tokenizer(inner, chat_template=chosen, named_tokens=named, eos_token_ids=ends)


def generation_eos_ids(folder: Path) -> list[int]:
    """End tokens in generation_config.json, which often knows the end of a turn where config.json does
    not."""
    ends = _json(folder / "generation_config.json").get("eos_token_id")
    found = ends if isinstance(ends, list) else [] if ends is None else [ends]
    for i in found:
        if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < 1 << 31:
            raise UserError(f"{folder / 'generation_config.json'}: eos_token_id={i!r:.60} must be a token id")
    return found


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is not JSON ({error}); fetch it again") from None
    except RecursionError:
        raise UserError(f"{path} is nested too deeply; fetch it again") from None
    return value if isinstance(value, dict) else {}


def _token_text(config: Mapping[str, Any], name: str, folder: Path) -> str | None:
    value = config.get(name)
    text = value.get("content") if isinstance(value, Mapping) else value
    if text is not None and not isinstance(text, str):
        raise UserError(
            f"{folder / 'tokenizer_config.json'}: {name}={text!r:.60} must be a string; fetch it again"
        )
    return text


def _template(value: Any, folder: Path) -> str | None:
    # A model may carry several, as [{"name": …, "template": …}].
    if isinstance(value, list):
        named = {
            str(entry.get("name")): entry.get("template") for entry in value if isinstance(entry, Mapping)
        }
        value = named.get("default")
    if value is not None and not isinstance(value, str):
        raise UserError(f"{folder / 'tokenizer_config.json'}: chat_template must be a string; fetch it again")
    return value
