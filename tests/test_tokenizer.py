"""Tokenizers from folders and GGUF metadata, chat templates, and text that arrives a token at a time."""

from __future__ import annotations

import heapq
import json

import gguf
import numpy as np
import pytest
from checkpoint_examples import byte_tokenizer, byte_tokens
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Inner

from jaxlamina.errors import UserError
from jaxlamina.text.tokenizer import Tokenizer, tokenizer_from_folder
from jaxlamina.weights.gguf_file import read_gguf
from jaxlamina.weights.gguf_tokenizer import tokenizer_from_gguf

MESSAGES = [{"role": "user", "content": "Hello"}]
TEXTS = ["", "a", "Hello, wörld!", "日本語", "👩‍👩‍👧‍👦 family", "tab\tnew\nline", " lead", "  two", "é́"]


def stream(tokenizer: Tokenizer, ids, skip=True) -> list[str]:
    detokenizer = tokenizer.detokenizer(skip)
    return [*(detokenizer.add(i) for i in ids), detokenizer.finish()]


# --- streaming, byte-level ---

BYTES = Tokenizer(byte_tokenizer(), named_tokens={"bos_token": "<s>", "eos_token": "</s>"})


def merged_byte_tokenizer() -> Inner:
    """Byte-level with merges that cut characters in the middle: two thirds of a kanji, an emoji in two
    halves."""
    tokens = byte_tokens()
    name = lambda raw: "".join(tokens[b] for b in raw)
    halves = ["日".encode()[:2], "😀".encode()[:2], "😀".encode()[2:], " é".encode()[:2], b"ab"]
    merges = [(name(raw[:1]), name(raw[1:])) for raw in halves]
    vocabulary = tokens + [name(raw) for raw in halves]
    inner = Inner(models.BPE({token: i for i, token in enumerate(vocabulary)}, merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<s>", "</s>"])
    inner.add_tokens([AddedToken("two words", normalized=False), AddedToken("日", normalized=False)])
    return inner


MERGED_INNER = merged_byte_tokenizer()
MERGED = Tokenizer(MERGED_INNER)


@given(st.text())
@example("👩‍👩‍👧‍👦")
def test_bytes_of_a_text_stream_back_to_the_text(text):
    pieces = stream(BYTES, BYTES.encode(text, add_special_tokens=False))
    if not any(name in text for name in ("<s>", "</s>")):
        assert "".join(pieces) == text
    assert all(
        len(piece) <= 1 for piece in pieces
    )  # one character when its last byte is there, nothing before


@given(st.lists(st.integers(0, MERGED.vocab_size + 3)), st.booleans())
@example([0xE6, 0x97, 0x41, 0xFF], True)
def test_any_ids_stream_to_what_tokenizers_decodes(ids, skip):
    whole = MERGED_INNER.decode(ids, skip_special_tokens=skip)
    assert "".join(stream(MERGED, ids, skip)) == whole == MERGED.decode(ids, skip)


@given(st.text(alphabet="日😀é ab"))
def test_no_piece_holds_half_a_character(text):
    pieces = stream(MERGED, MERGED.encode(text))
    assert "".join(pieces) == text
    assert "\ufffd" not in "".join(pieces)
    assert pieces[-1] == ""


def test_an_emoji_of_four_tokens_appears_at_once():
    assert stream(BYTES, [0x61, *"😀".encode(), 0x62]) == ["a", "", "", "", "😀", "b", ""]


def test_a_character_that_is_never_finished_is_one_replacement_at_the_end():
    assert stream(BYTES, [0x61, *"😀".encode()[:3]]) == ["a", "", "", "", "\ufffd"]


def test_special_tokens_are_skipped_or_shown():
    ids = [256, 0xC3, 257, 0xA9]
    assert stream(BYTES, ids) == ["", "", "", "é", ""]
    assert "".join(stream(BYTES, ids, skip=False)) == "<s>\ufffd</s>\ufffd"
    assert BYTES.decode(ids) == "é"


def test_an_id_beyond_the_vocabulary_has_no_text():
    assert BYTES.decode([0x61, 5000, -1, 0x62]) == "ab"


# --- streaming, other decoders ---


def whitespace_tokenizer() -> Tokenizer:
    inner = Inner(models.WordLevel({"hello": 0, "world": 1, "[UNK]": 2}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return Tokenizer(inner)


@given(st.lists(st.integers(0, 2)))
def test_an_unknown_decoder_streams_the_whole_text_too(ids):
    tokenizer = whitespace_tokenizer()
    assert "".join(stream(tokenizer, ids)) == tokenizer._inner.decode(ids)


# --- SentencePiece vocabularies, from GGUF metadata ---

WORDS = ["▁", "a", "b", "c", "▁a", "ab", "bc", "▁ab", "abc", "▁▁", "é", "日", "▁abc", "ca", "cab"]


def spm_metadata(**changes):
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *WORDS]
    types = [2, 3, 3, *[6] * 256, *[1] * len(WORDS)]
    scores = [0.0] * 259 + [-float((7 * i) % len(WORDS)) for i in range(len(WORDS))]
    meta = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return meta | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}


SPM_META = spm_metadata()
SPM = tokenizer_from_gguf(SPM_META, "spm.gguf")


def sentencepiece_encode(text: str, meta) -> list[int]:
    """SentencePiece's own algorithm as llama.cpp has it: join the neighbours of the best score, leftmost
    first."""
    ids = {token: i for i, token in enumerate(meta["tokenizer.ggml.tokens"])}
    scores = meta["tokenizer.ggml.scores"]
    if not text:
        return []
    symbols: list[str | None] = list(("▁" + text).replace(" ", "▁"))
    after = {i: i + 1 for i in range(len(symbols))}
    before = {i: i - 1 for i in range(len(symbols) + 1)}
    queue: list[tuple[float, int, int, str]] = []

    def offer(left: int, right: int) -> None:
        if left >= 0 and right < len(symbols):
            joined = symbols[left] + symbols[right]
            if joined in ids:
                heapq.heappush(queue, (-scores[ids[joined]], left, right, joined))

    for i in range(len(symbols) - 1):
        offer(i, i + 1)
    while queue:
        _, left, right, joined = heapq.heappop(queue)
        if symbols[left] is None or symbols[right] is None or symbols[left] + symbols[right] != joined:
            continue
        symbols[left], symbols[right] = joined, None
        after[left] = after[right]
        before[after[right]] = left
        offer(before[left], left)
        offer(left, after[left])
    out: list[int] = []
    for symbol in symbols:
        if symbol in ids:
            out.append(ids[symbol])
        elif symbol is not None:
            out += [ids[f"<0x{byte:02X}>"] for byte in symbol.encode()]
    return out


@given(st.text(alphabet="abc é日😀"))
@settings(max_examples=300)
def test_rebuilt_sentencepiece_encodes_as_its_own_algorithm(text):
    assert SPM.encode(text, add_special_tokens=False) == sentencepiece_encode(text, SPM_META)
    assert SPM.encode(text)[0] == 1
    assert SPM.decode(SPM.encode(text)) == text


@given(st.text(alphabet="abc é日😀"))
def test_rebuilt_sentencepiece_decodes_as_tokenizers(text):
    ids = SPM.encode(text)
    assert SPM.decode(ids) == SPM._inner.decode(ids)
    assert "".join(stream(SPM, ids)) == text


def test_byte_fallback_appears_a_character_at_a_time():
    ids = SPM.encode("a😀", add_special_tokens=False)
    assert stream(SPM, ids) == ["a", "", "", "", "😀", ""]


@given(st.lists(st.integers(0, 300)))
def test_random_sentencepiece_ids_stream_to_their_decode(ids):
    assert "".join(stream(SPM, ids)) == SPM.decode(ids)


def test_space_prefix_and_bos_follow_the_file():
    plain = tokenizer_from_gguf(spm_metadata(add_space_prefix=False, add_bos_token=False), "x")
    ids = plain.encode("abc")
    assert ids == [SPM_META["tokenizer.ggml.tokens"].index("abc")]
    assert plain.decode(ids) == "abc"
    assert plain.decode(plain.encode(" abc")) == " abc"
    ends = tokenizer_from_gguf(spm_metadata(add_eos_token=True), "x").encode("abc")
    assert (ends[0], ends[-1]) == (1, 2)


def test_equal_scores_are_an_error():
    meta = spm_metadata(scores=[0.0] * len(SPM_META["tokenizer.ggml.tokens"]))
    with pytest.raises(UserError, match="pieces of equal score"):
        tokenizer_from_gguf(meta, "x.gguf")


# --- byte-level BPE from GGUF metadata ---


def bpe_metadata(**changes):
    tokens = [*byte_tokens(), "<|end|>", "<user>", "12", "123", "Ġa", "ab", "abc"]
    meta = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 256 + [3, 4] + [1] * 5,
        "tokenizer.ggml.merges": ["1 2", "12 3", "Ġ a", "a b"],
        "tokenizer.ggml.eos_token_id": 256,
    }
    return meta | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}


def words(pre: str, text: str) -> list[str]:
    tokenizer = tokenizer_from_gguf(bpe_metadata(pre=pre), "x")
    return [text[begin:end] for _, (begin, end) in tokenizer._inner.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("smollm", ["It", "'s", " ", "1", "2", "3", "4", " o", "'", "clock", "...", "  ", " Ça", "\n\n"]),
        ("gpt-2", ["It", "'s", " 1234", " o", "'", "clock", "...", "  ", " Ça", "\n\n"]),
        ("default", ["It", "'", "s", " ", "123", "4", " o", "'", "clock", "...", "  ", " Ça", "\n\n"]),
        ("llama-bpe", ["It", "'s", " ", "123", "4", " o", "'clock", "...", "  ", " Ça", "\n\n"]),
        ("smaug-bpe", ["It", "'s", " ", "123", "4", " o", "'clock", "...", "  ", " Ça", "\n\n"]),
        ("refact", ["It", "'s", " ", "1", "2", "3", "4", " o", "'", "clock", "...", "  ", " Ça", "\n\n"]),
        ("qwen2", ["It", "'s", " ", "1", "2", "3", "4", " o", "'clock", "...", "  ", " Ça", "\n\n"]),
    ],
)
def test_each_pre_tokenizer_cuts_its_own_way(pre, expected):
    assert words(pre, "It's 1234 o'clock...   Ça\n\n") == expected


@given(st.text())
@example("a1２² ½b  \r\n x")
def test_smollm_cuts_as_digits_then_byte_level(text):
    """FINDINGS of llama.cpp runs: this pair gives llama.cpp's tokens."""
    pair = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    ours = tokenizer_from_gguf(bpe_metadata(), "x")._inner.pre_tokenizer
    assert ours.pre_tokenize_str(text) == pair.pre_tokenize_str(text)


def test_merges_special_tokens_and_ends():
    tokenizer = tokenizer_from_gguf(bpe_metadata(), "x")
    tokens = bpe_metadata()["tokenizer.ggml.tokens"]
    assert tokenizer.encode("ab<|end|><user> a") == [
        tokens.index(t) for t in ("ab", "<|end|>", "<user>", "Ġa")
    ]
    assert tokenizer.decode(tokenizer.encode("ab<|end|><user> a")) == "ab<user> a"
    assert tokenizer.eos_token_ids == (256,)
    assert tokenizer.vocab_size == len(tokens)
    # llama-bpe takes a whole word that is in the vocabulary without its merges, the others do not.
    assert tokenizer.encode("abc") == [tokens.index("ab"), tokens.index("c")]
    assert tokenizer_from_gguf(bpe_metadata(pre="llama-bpe"), "x").encode("abc") == [tokens.index("abc")]
    smaug = tokenizer_from_gguf(bpe_metadata(pre="smaug-bpe"), "x")
    assert smaug.encode("abc") == [tokens.index("ab"), tokens.index("c")]


def test_ends_of_a_turn_are_found_by_name():
    tokens = [*byte_tokens(), "</s>", "<|eot_id|>", "<end_of_turn>", "<|end|>"]
    meta = bpe_metadata(tokens=tokens, token_type=[1] * 256 + [3] * 4, merges=[])
    assert tokenizer_from_gguf(meta, "x").eos_token_ids == (256, 257, 258, 259)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"pre": "tekken"}, "tokenizer.ggml.pre='tekken' is not supported; supported: default"),
        ({"model": "t5"}, "tokenizer.ggml.model='t5' is not supported; supported: gpt2, llama"),
        ({"model": None}, "has no tokenizer"),
        ({"tokens": []}, "has no tokenizer"),
        ({"token_type": [1]}, "263 tokens but 1 token types"),
        ({"tokens": ["a"] * 263}, "has duplicates"),
        ({"merges": ["1 zz"]}, "merges do not fit"),
        ({"model": "llama"}, "needs tokenizer.ggml.scores"),
    ],
    ids=range(8),
)
def test_a_vocabulary_that_is_not_supported_is_an_error_that_names_it(changes, problem):
    with pytest.raises(UserError, match=problem) as error:
        tokenizer_from_gguf(bpe_metadata(**changes), "some.gguf")
    assert "some.gguf" in str(error.value) and "\n" not in str(error.value)


def test_metadata_survives_a_real_file(tmp_path):
    meta = bpe_metadata()
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(meta["tokenizer.ggml.tokens"])
    writer.add_token_types(meta["tokenizer.ggml.token_type"])
    writer.add_token_merges(meta["tokenizer.ggml.merges"])
    writer.add_eos_token_id(256)
    writer.add_tensor("x", np.zeros(1, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    read = tokenizer_from_gguf(read_gguf(tmp_path / "t.gguf").metadata, "t.gguf")
    direct = tokenizer_from_gguf(meta, "x")
    assert [read.encode(text) for text in TEXTS] == [direct.encode(text) for text in TEXTS]


# --- folders ---


def write_tokenizer(folder, config=None, template=None, generation=None):
    inner = byte_tokenizer()
    inner.enable_truncation(3)
    inner.enable_padding(length=9)
    inner.save(str(folder / "tokenizer.json"))
    for name, value in (("tokenizer_config.json", config), ("generation_config.json", generation)):
        if value is not None:
            (folder / name).write_text(json.dumps(value))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def test_a_folder_gives_ends_template_and_whole_prompts(tmp_path):
    config = {
        "eos_token": {"content": "</s>", "special": True},
        "bos_token": "<s>",
        "chat_template": "{{ bos_token }}x",
    }
    tokenizer = tokenizer_from_folder(
        write_tokenizer(tmp_path, config, generation={"eos_token_id": [9, 257]}), (7,)
    )
    assert tokenizer.eos_token_ids == (7, 9, 257)
    assert tokenizer.bos_token_id == 256
    assert tokenizer.encode("abcdef") == list(b"abcdef")  # the file's truncation and padding are off
    assert tokenizer.apply_chat_template(MESSAGES) == "<s>x"


def test_the_template_file_wins_and_lists_have_a_default(tmp_path):
    many = [{"name": "tool", "template": "t"}, {"name": "default", "template": "d"}]
    folder = write_tokenizer(tmp_path, {"chat_template": many})
    assert tokenizer_from_folder(folder).apply_chat_template(MESSAGES) == "d"
    folder = write_tokenizer(tmp_path, {"chat_template": many}, template="file")
    assert tokenizer_from_folder(folder).apply_chat_template(MESSAGES) == "file"


def test_what_save_writes_reads_back(tmp_path):
    tokenizer = Tokenizer(
        byte_tokenizer(), chat_template="{{ eos_token }}", named_tokens={"eos_token": "</s>"}
    )
    tokenizer.save(tmp_path)
    again = tokenizer_from_folder(tmp_path)
    assert again.eos_token_ids == tokenizer.eos_token_ids == (257,)
    assert again.apply_chat_template(MESSAGES) == "</s>"
    assert [again.encode(text) for text in TEXTS] == [tokenizer.encode(text) for text in TEXTS]


def test_a_folder_without_a_tokenizer_says_what_to_do(tmp_path):
    with pytest.raises(UserError, match=r"no tokenizer\.json; fetch it too, or give token ids"):
        tokenizer_from_folder(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(UserError, match=r"AutoTokenizer\.from_pretrained"):
        tokenizer_from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"tokenizer\.json is not a tokenizer"):
        tokenizer_from_folder(tmp_path)
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(UserError, match=r"tokenizer_config\.json is not JSON"):
        tokenizer_from_folder(tmp_path)


def test_prompts_that_are_no_text_are_errors():
    with pytest.raises(UserError, match="must be a string, not int"):
        BYTES.encode(3)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="lone surrogates"):
        BYTES.encode("a\ud800")


# --- chat templates ---


def render(template, messages=MESSAGES, **variables):
    return Tokenizer(byte_tokenizer(), chat_template=template).apply_chat_template(messages, **variables)


def test_what_transformers_gives_templates_is_there():
    assert render("{% for m in messages %}\n  {% if true %}{{ m.role }}|{% endif %}\n{% endfor %}") == "user|"
    assert (
        render("{{ messages[0] | tojson }}", [{"role": "u", "content": "<é>"}])
        == '{"role": "u", "content": "<é>"}'
    )
    assert (
        render("{{ {'b': 1, 'a': [2]} | tojson(indent=1, sort_keys=true) }}")
        == '{\n "a": [\n  2\n ],\n "b": 1\n}'
    )
    assert len(render("{{ strftime_now('%Y-%m-%d') }}")) == 10
    assert render("{% for m in messages %}{% break %}{% endfor %}x") == "x"
    assert render("{% generation %}{{ messages[0].content }}{% endgeneration %}!") == "Hello!"
    assert render("{{ add_generation_prompt }}{{ tools }}{{ word }}", word="w") == "TrueNonew"
    assert render("{{ add_generation_prompt }}", add_generation_prompt=False) == "False"
    assert render("{% set ns = namespace(n=1) %}{% set ns.n = 2 %}{{ ns.n }}") == "2"


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refused the messages: roles must alternate"),
        ("{% if %}", "chat template is broken at line 1"),
        ("{{ messages[0].__class__.__mro__[1].__subclasses__() }}", "refused the messages: .*unsafe"),
        ("{{ raise_exception.__globals__.os }}", "refused the messages: .*unsafe"),
        ("{{ messages.append(1) }}", "refused the messages: .*unsafe"),
        ("{% for i in range(10**9) %}{% endfor %}", "chat template failed"),
        ("{{ nothing.here }}", "refused the messages"),
        ("{{ 1 / 0 }}", "chat template failed"),
    ],
    ids=range(8),
)
def test_a_template_that_refuses_fails_or_breaks_out_is_one_line(template, problem):
    with pytest.raises(UserError, match=problem) as error:
        render(template)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "messages",
    ["hello", {}, [], [3], [{"content": "x"}], [{"role": "user"}], [{"role": "user", "content": object()}]],
)
def test_messages_of_another_form_are_errors(messages):
    with pytest.raises(UserError, match="message"):
        render("x{{ messages[0].content }}", messages)


SAID = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"


def test_the_last_message_is_continued():
    begun = [*MESSAGES, {"role": "a", "content": "Hello "}]
    how = {"continue_final_message": True, "add_generation_prompt": False}
    assert render(SAID, begun, **how) == "<user>Hello</><a>Hello "
    assert render(SAID, [{"role": "a", "content": None}], **how) == "<a>"
    assert render(SAID, MESSAGES, chat_template="{{ messages[0].content }}!") == "Hello!"
    for template, messages, more, problem in (
        (SAID, begun, {"add_generation_prompt": True}, "give one"),
        ("x", begun, {}, "leaves out the last message"),
        (SAID, [{"role": "a", "content": ["x"]}], {}, "its content is no text"),
        (SAID, [], {}, "messages must be a list"),
        (SAID, "text", {}, "messages must be a list"),
    ):
        with pytest.raises(UserError, match=problem):
            render(template, messages, **how | more)


def test_no_template_is_an_error():
    with pytest.raises(UserError, match="no chat template; use generate"):
        BYTES.apply_chat_template(MESSAGES)


def test_blanks_between_special_tokens_are_left_out_where_that_is_asked_for():
    """By a decoder that puts them there, as one of whole words does."""
    inner = Inner(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    inner.add_special_tokens(["<x>", "<y>"])
    words = Tokenizer(inner)

    def text(ids, *how):
        detokenizer = words.detokenizer(*how)
        return "".join([*map(detokenizer.add, ids), detokenizer.finish()])

    ids = [0, 2, 3, 2, 1, 3]
    assert text(ids, False, True) == "a <x> <y> <x> b <y>"
    assert text(ids, False, False) == "a <x><y><x> b <y>"
    assert text(ids, True, False) == text(ids) == "a b"
    assert words.is_special("<x>") and not words.is_special("a")
