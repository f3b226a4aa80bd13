"""A `tokenizers` tokenizer rebuilt from a GGUF file's metadata.

Knows llama.cpp's two vocabulary forms that these models use: `gpt2` (byte-level BPE, with the pre-tokenizer
named in `tokenizer.ggml.pre`) and `llama` (SentencePiece BPE, merges implied by scores). Every other form is
an error that names it: a wrong pre-tokenizer gives plausible, worse text and no failure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from jaxlamina.errors import UserError
from jaxlamina.text.tokenizer import Tokenizer

# Token types of llama.cpp.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_TIKTOKEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# `tokenizer.ggml.pre` -> regexes applied one after the other; each match stands alone.
_PRE: dict[str, tuple[str, ...]] = {
    "default": (r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "llama-bpe": (_TIKTOKEN.replace("DIGITS", "{1,3}"),),
    "qwen2": (_TIKTOKEN.replace("DIGITS", ""),),
    "smaug-bpe": (_TIKTOKEN.replace("DIGITS", "{1,3}"),),
}
_ALIASES = {
    "dbrx": "smaug-bpe",
    "refact": "smollm",
    "llama3": "llama-bpe",
    "llama-v3": "llama-bpe",
    "deepseek-r1-qwen": "qwen2",
}

# Tokens that end a turn even where the file names another end of text.
_TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<|eom_id|>", "<|end_of_turn|>", "<end_of_turn>", "<|end|>")


def tokenizer_from_gguf(meta: Mapping[str, Any], where: str) -> Tokenizer:
    """The tokenizer of a GGUF file with metadata `meta`; `where` names the file in errors.

    Raises `UserError` for a vocabulary or a pre-tokenizer that is not supported, or if there is none.
    """
    kind, tokens = meta.get("tokenizer.ggml.model"), meta.get("tokenizer.ggml.tokens")
    if kind is None or not isinstance(tokens, list) or not tokens:
        raise UserError(f"{where} has no tokenizer; give token ids instead of text")
    types = meta.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise UserError(f"{where}: {len(tokens)} tokens but {len(types)} token types; fetch the file again")
    if len(set(tokens)) != len(tokens):
        raise UserError(f"{where}: tokenizer.ggml.tokens has duplicates; fetch the file again")
    if kind == "gpt2":
        inner, add_bos = _byte_level_bpe(meta, tokens, where)
    elif kind == "llama":
        inner, add_bos = _sentencepiece_bpe(meta, tokens, types, where), True
    else:
        raise UserError(f"{where}: tokenizer.ggml.model={kind!r} is not supported; supported: gpt2, llama")
    _add_tokens(inner, tokens, types)
    named = _named_tokens(meta, tokens)
    _add_ends(inner, meta, named, add_bos)
    return Tokenizer(
        inner,
        chat_template=meta.get("tokenizer.chat_template"),
        named_tokens=named,
        eos_token_ids=gguf_eos_ids(meta),
    )


def gguf_eos_ids(meta: Mapping[str, Any]) -> tuple[int, ...]:
    """Ids that end a text: the named end of text and end of turn, and turn ends known by their text."""
    tokens, types = meta.get("tokenizer.ggml.tokens"), meta.get("tokenizer.ggml.token_type")
    found = [meta.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    if isinstance(tokens, list) and isinstance(types, list) and len(types) == len(tokens):
        wanted = set(_TURN_ENDS)
        found += [i for i, token in enumerate(tokens) if token in wanted and types[i] == CONTROL]
    return tuple(dict.fromkeys(i for i in found if isinstance(i, int)))


def _byte_level_bpe(
    meta: Mapping[str, Any], tokens: Sequence[str], where: str
) -> tuple[tokenizers.Tokenizer, bool]:
    name = meta.get("tokenizer.ggml.pre", "default")
    name = _ALIASES.get(name, name)
    if name not in _PRE:
        raise UserError(
            f"{where}: the pre-tokenizer tokenizer.ggml.pre={name!r} is not supported; supported: "
            f"{', '.join(_PRE)}. Use the Hugging Face folder of this model"
        )
    merges = [tuple(line.split(" ", 1)) for line in meta.get("tokenizer.ggml.merges") or ()]
    llama3 = name == "llama-bpe"
    try:
        model = models.BPE({token: i for i, token in enumerate(tokens)}, merges, ignore_merges=llama3)
    except Exception as error:  # noqa: BLE001 (tokenizers raises nothing more precise)
        reason = " ".join(str(error).split())[:160]
        raise UserError(f"{where}: the tokenizer's merges do not fit its tokens ({reason})") from None
    inner = tokenizers.Tokenizer(model)
    if name == "qwen2":
        inner.normalizer = normalizers.NFC()  # as Qwen's own tokenizer; llama.cpp leaves it out
    splits = [pre_tokenizers.Split(Regex(regex), behavior="isolated") for regex in _PRE[name]]
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    inner.decoder = decoders.ByteLevel()
    return inner, llama3


def _sentencepiece_bpe(
    meta: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int], where: str
) -> tokenizers.Tokenizer:
    scores = meta.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise UserError(f"{where}: tokenizer.ggml.model='llama' needs tokenizer.ggml.scores, one a token")
    vocabulary = {token: i for i, token in enumerate(tokens)}
    # SentencePiece joins the neighbours whose union scores best, so every way to cut a piece is a merge of
    # the piece's rank. Equal scores would leave the order to the position in the text, which merges cannot
    # say.
    pieces = [(scores[i], token) for token, i in vocabulary.items() if types[i] == NORMAL and len(token) > 1]
    if len({score for score, _ in pieces}) < len(pieces):
        raise UserError(
            f"{where}: the SentencePiece vocabulary has pieces of equal score, so its merges cannot be "
            "rebuilt; use the Hugging Face folder of this model"
        )
    usable = {token for token, i in vocabulary.items() if types[i] in (NORMAL, USER_DEFINED)}
    merges = [
        (piece[:cut], piece[cut:])
        for _, piece in sorted(pieces, reverse=True)
        for cut in range(1, len(piece))
        if piece[:cut] in usable and piece[cut:] in usable
    ]
    unknown = next((token for token, kind in zip(tokens, types, strict=True) if kind == UNKNOWN), None)
    has_bytes = all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
    inner = tokenizers.Tokenizer(
        models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=has_bytes)
    )
    prefix = bool(meta.get("tokenizer.ggml.add_space_prefix", True))
    steps: list[Any] = [normalizers.Prepend("▁")] if prefix else []
    inner.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    ends: list[Any] = [decoders.Strip(" ", 1, 0)] if prefix else []
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *ends]
    )
    return inner


def _add_tokens(inner: tokenizers.Tokenizer, tokens: Sequence[str], types: Sequence[int]) -> None:
    """Make tokens that stand outside the model found in a text as one piece; they keep their ids."""
    typed = list(zip(tokens, types, strict=True))
    inner.add_special_tokens(
        [AddedToken(t, normalized=False, special=True) for t, kind in typed if kind == CONTROL]
    )
    inner.add_tokens([AddedToken(t, normalized=False) for t, kind in typed if kind == USER_DEFINED])


def _named_tokens(meta: Mapping[str, Any], tokens: Sequence[str]) -> dict[str, str]:
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: meta.get(f"tokenizer.ggml.{key}_token_id") for name, key in keys.items()}
    return {name: tokens[i] for name, i in ids.items() if isinstance(i, int) and 0 <= i < len(tokens)}


def _add_ends(
    inner: tokenizers.Tokenizer, meta: Mapping[str, Any], named: Mapping[str, str], add_bos_default: bool
) -> None:
    """BOS and EOS around an encoded text where the file, or llama.cpp's default for its kind, says so."""
    first = named.get("bos_token") if meta.get("tokenizer.ggml.add_bos_token", add_bos_default) else None
    last = named.get("eos_token") if meta.get("tokenizer.ggml.add_eos_token", False) else None
    ends = [token for token in (first, last) if token is not None]
    if ends:
        parts = [*([first] if first else []), "$A", *([last] if last else [])]
        inner.post_processor = processors.TemplateProcessing(
            single=parts, special_tokens=[(token, inner.token_to_id(token)) for token in dict.fromkeys(ends)]
        )
