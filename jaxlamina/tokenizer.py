"""Text to token ids and back, and chats to prompts: a thin face over Hugging Face `tokenizers`.

Knows `tokenizer.json` and the small JSON files beside it. Rebuilding a tokenizer from GGUF metadata is
`weights/gguf_tokenizer.py`; what happens a token at a time is `detokenizer.py`. Knows nothing of models.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from jaxlamina.chat_template import render_chat
from jaxlamina.detokenizer import (
    ByteDetokenizer,
    IncrementalDetokenizer,
    TokenBytes,
    WholeTextDetokenizer,
    token_bytes,
)
from jaxlamina.errors import UserError

TEMPLATE_FILE = "chat_template.jinja"
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class Tokenizer:
    """One vocabulary with its chat template.

    `inner` encodes; `named_tokens` are strings such as `bos_token` for the template; `eos_token_ids` end a text.
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
            return self._inner.encode(text, add_special_tokens=add_special_tokens).ids
        except (TypeError, UnicodeEncodeError):  # lone surrogates, which no UTF-8 has
            raise UserError(
                "the prompt has characters that are not valid Unicode (lone surrogates)"
            ) from None

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`, bytes that are no UTF-8 as U+FFFD; always what a detokenizer streams."""
        detokenizer = self.detokenizer(skip_special_tokens)
        return "".join([*map(detokenizer.add, ids), detokenizer.finish()])

    def detokenizer(self, skip_special_tokens: bool = True) -> IncrementalDetokenizer:
        """A fresh stream of text: `.add(token_id)` for each token, `.finish()` at the end."""
        if self._bytes is not None:
            return ByteDetokenizer(self._bytes, skip_special_tokens)
        return WholeTextDetokenizer(
            lambda ids: self._inner.decode(ids, skip_special_tokens=skip_special_tokens)
        )

    @cached_property
    def _bytes(self) -> TokenBytes | None:
        return token_bytes(self._inner)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The prompt for `messages`; `variables` (tools, documents, …) go to the template.

        Raises `UserError` if the model has no chat template or the template refuses the messages.
        """
        if self.chat_template is None:
            raise UserError(
                "this model has no chat template; use generate with a plain prompt instead of chat"
            )
        given = {"tools": None, "documents": None} | self.named_tokens | variables
        return render_chat(
            self.chat_template, messages, given | {"add_generation_prompt": add_generation_prompt}
        )

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
    except Exception as error:  # noqa: BLE001 (tokenizers raises nothing more precise)
        raise UserError(
            f"{path} is not a tokenizer ({str(error).splitlines()[0][:120]}); fetch it again"
        ) from None
    config = _json(folder / "special_tokens_map.json") | _json(folder / "tokenizer_config.json")
    named = {name: text for name in _NAMED_TOKENS if (text := _token_text(config.get(name))) is not None}
    template = folder / TEMPLATE_FILE
    chosen = (
        template.read_text(encoding="utf-8") if template.is_file() else _template(config.get("chat_template"))
    )
    ends = [*eos_token_ids, *generation_eos_ids(folder)]
    return Tokenizer(inner, chat_template=chosen, named_tokens=named, eos_token_ids=ends)


def generation_eos_ids(folder: Path) -> list[int]:
    """End tokens in generation_config.json, which often knows the end of a turn where config.json does not."""
    ends = _json(folder / "generation_config.json").get("eos_token_id")
    return [i for i in (ends if isinstance(ends, list) else [ends]) if isinstance(i, int)]


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is not JSON ({error}); fetch it again") from None
    return value if isinstance(value, dict) else {}


def _token_text(value: Any) -> str | None:
    return value.get("content") if isinstance(value, Mapping) else value


def _template(value: Any) -> str | None:
    # A model may carry several, as [{"name": …, "template": …}].
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, Mapping)}
        return named.get("default")
    return value
