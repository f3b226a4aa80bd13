"""Models of the Hugging Face Hub, by the real client against a local server of its protocol: what is fetched,
what is said."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoint_examples import LLAMA, byte_tokenizer, host_params, write_folder
from hub_server import GOOD_TOKEN, Hub, serving_hub

from jaxlamina.errors import UserError
from jaxlamina.model_files import find
from jaxlamina.model_files import hub as hub_names
from jaxlamina.model_files.hub import INDEX_NAME as INDEX

NEEDED = {
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    INDEX,
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
}
OTHERS = (
    "README.md",
    "pytorch_model.bin",
    "consolidated.safetensors",
    "onnx/model.onnx",
    "original/params.json",
)
FIND = """
import json, sys
from jaxlamina.errors import UserError
from jaxlamina.model_files import find
for name, revision in json.loads(sys.argv[1]):
    try:
        print(json.dumps(["found", str(find(name, revision))]))
    except UserError as error:
        print(json.dumps(["error", str(error)]))
assert "jax" not in sys.modules
"""
GENERATE = """
import sys
from jaxlamina import LLM, SamplingParams
params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
options = {"max_num_seqs": 1, "max_model_len": 32, "kv_slots": 64}
for name, revision in (("org/tiny", None), ("org/tiny", "v2"), (sys.argv[1], None), ("org/tiny:tiny.gguf", None)):
    llm = LLM(name, revision=revision, **options)
    print(*llm.generate(list(b"hello"), params)[0].token_ids, llm.dtype)
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """main: two shards and all else that repositories hold; v2: other weights in one file."""
    root = tmp_path_factory.mktemp("repositories")
    tokenizer = byte_tokenizer()
    main = write_folder(root / "main", LLAMA, host_params(LLAMA), n_shards=2, tokenizer=tokenizer)
    (main / "generation_config.json").write_text(json.dumps({"eos_token_id": 257}))
    (main / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    (main / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    for name in OTHERS:
        (main / name).parent.mkdir(exist_ok=True)
        (main / name).write_bytes(b"not needed " * 100)
    write_folder(root / "v2", LLAMA, host_params(LLAMA, seed=2), tokenizer=tokenizer)
    return root


@pytest.fixture
def hub(folders: Path) -> Iterator[Hub]:
    with serving_hub() as server:
        server.add("org/tiny", folders / "main")
        server.add("org/tiny", folders / "v2", "v2")
        server.add("org/gated", folders / "v2", access="gated")
        server.add("org/private", folders / "v2", access="private")
        yield server


def look_up(hub: Hub, home: Path, *names: str | tuple[str, str], **env: str) -> list[tuple[str, str]]:
    """(found, path) or (error, line) of each name, by a process of its own."""
    asked = json.dumps([name if isinstance(name, tuple) else (name, None) for name in names])
    done = hub.run(home, "-c", FIND, asked, **env)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


def test_what_is_needed_comes_once_and_serves_without_the_hub(hub: Hub, folders: Path, tmp_path: Path):
    [(kind, first)] = look_up(hub, tmp_path, "org/tiny")
    assert kind == "found", first
    assert {path.name for path in Path(first).iterdir()} == NEEDED
    for name in NEEDED:
        assert (Path(first) / name).read_bytes() == (folders / "main" / name).read_bytes()
    assert hub.taken() == NEEDED
    # Asked again: no byte of a file. Offline, or with the Hub down: not even a question.
    commit = hub.repositories["org/tiny"].commit("main")
    assert (
        look_up(hub, tmp_path, "org/tiny", ("org/tiny", "main"), ("org/tiny", commit))
        == [("found", first)] * 3
    )
    assert hub.taken() == set()
    assert look_up(hub, tmp_path, "org/tiny", HF_HUB_OFFLINE="1") == [("found", first)]
    assert hub.requests == []
    assert look_up(hub, tmp_path, "org/tiny", HF_ENDPOINT="http://127.0.0.1:9") == [("found", first)]
    # Another revision is another folder.
    [(_, other)] = look_up(hub, tmp_path, ("org/tiny", "v2"))
    assert other != first and hub.taken() == {"model.safetensors"}  # the other two files are the same
    assert {path.name for path in Path(other).iterdir()} == {
        "config.json",
        "tokenizer.json",
        "model.safetensors",
    }


def test_an_interrupted_file_goes_on_where_it_was(hub: Hub, tmp_path: Path):
    mib = 2**20
    content = random.Random(1).randbytes(25 * mib)  # the client writes 10 MiB at a time
    hub.repositories["org/tiny"].revisions["main"]["large.gguf"] = content
    hub.cut_after = 15 * mib
    [(kind, path)] = look_up(hub, tmp_path, "org/tiny:large.gguf")
    assert kind == "found", path
    assert f"bytes={10 * mib}-" in [asked for _, _, asked in hub.requests]
    assert Path(path).read_bytes() == content


def test_a_file_of_ggufs_is_fetched_alone(hub: Hub, tmp_path: Path):
    repository = hub.repositories["org/tiny"].revisions
    repository["ggufs"] = {"a-Q4.gguf": b"GGUF" * 9, "b-Q8.gguf": b"GGUF", "README.md": b""}
    found = look_up(
        hub, tmp_path, ("org/tiny:a-Q4.gguf", "ggufs"), ("org/tiny", "ggufs"), ("org/tiny:c.gguf", "ggufs")
    )
    assert found[0][0] == "found" and Path(found[0][1]).read_bytes() == b"GGUF" * 9
    assert hub.taken() == {"a-Q4.gguf"}
    for (kind, line), start in zip(found[1:], ("has no safetensors", "has no file 'c.gguf'"), strict=True):
        assert (
            kind == "error"
            and start in line
            and "a-Q4.gguf, b-Q8.gguf: name one, as org/tiny:a-Q4.gguf" in line
        )


def test_what_the_hub_refuses_is_one_line(hub: Hub, tmp_path: Path):
    revisions = hub.repositories["org/tiny"].revisions
    revisions["pickles"] = {"config.json": revisions["v2"]["config.json"], "pytorch_model.bin": b"x"}
    revisions["mamba"] = revisions["v2"] | {"config.json": b'{"model_type": "mamba2"}'}
    revisions["torn"] = {
        k: v for k, v in revisions["main"].items() if k != "model-00002-of-00002.safetensors"
    }
    cases = {
        (
            "org/none",
            None,
        ): r"unknown model 'org/none': .*check the name \(known .*smollm2-135m-instruct.*HF_TOKEN",
        ("org/private", None): r"unknown model 'org/private': .*for a private one set HF_TOKEN",
        (
            "org/gated",
            None,
        ): r"org/gated is gated: ask for access at http://127.0.0.1:\d+/org/gated, then set HF_TOKEN",
        ("org/tiny", "v9"): r"org/tiny has no revision 'v9'",
        ("org/tiny", "pickles"): r"PyTorch pickles and no safetensors",
        ("org/tiny", "mamba"): r"model_type='mamba2' is not supported",
        ("org/tiny", "torn"): r"lacks 1 of 2 shards that its model.safetensors.index.json names",
        ("llama-9000", None): r"unknown model 'llama-9000': .*smollm2-135m-instruct",
        ("smollm2-135m-instruct", "v2"): r"revision='v2' is for models of the Hub",
    }
    found = look_up(hub, tmp_path, *cases)
    for (kind, line), pattern in zip(found, cases.values(), strict=True):
        assert kind == "error" and re.search(pattern, line) and "\n" not in line, line
    assert not {name for name in hub.taken() if name.endswith((".safetensors", ".bin"))}
    # With a token that may: both; with one that may not, the same lines.
    found = look_up(hub, tmp_path, "org/gated", "org/private", "org/none", HF_TOKEN=GOOD_TOKEN)
    assert [kind for kind, _ in found] == ["found", "found", "error"]
    (tmp_path / "b").mkdir()
    [(_, gated), (_, private)] = look_up(hub, tmp_path / "b", "org/gated", "org/private", HF_TOKEN="hf_other")
    assert "is gated" in gated and "unknown model" in private
    # Nothing cached and no Hub.
    look_up(hub, tmp_path / "b", ("org/tiny", "gemma"))
    [(_, half)] = look_up(
        hub, tmp_path / "b", ("org/tiny", "gemma"), HF_HUB_OFFLINE="1"
    )  # config, no weights
    assert "HF_HUB_OFFLINE is set, and" in half and "does not have all of it" in half
    [(_, offline)] = look_up(hub, tmp_path / "b", "org/tiny", HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE is set, and" in offline
    [(_, down)] = look_up(hub, tmp_path / "b", "org/tiny:x.gguf", HF_ENDPOINT="http://127.0.0.1:9")
    assert "http://127.0.0.1:9 cannot be reached" in down and "does not have all of it" in down


def test_a_folder_of_the_name_goes_first(hub: Hub, folders: Path, tmp_path: Path, monkeypatch):
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "tiny").symlink_to(folders / "v2")
    assert look_up(hub, tmp_path, "org/tiny") == [("found", "org/tiny")]
    assert hub.requests == []
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="revision='v2' is for models of the Hub, and org/tiny is here"):
        find("org/tiny", "v2")


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("HuggingFaceTB/SmolLM2-135M-Instruct", True),
        ("bartowski/Llama-3.2-1B-GGUF:Llama-3.2-1B-Q4_K_M.gguf", True),
        ("org/name:sub/x.gguf", True),
        ("models/x.gguf", False),
        ("./org/name", False),
        ("a/b/c", False),
        ("/abs/olute", False),
        ("org/../x", False),
        ("org/name:x.bin", False),
        ("name", False),
        ("org/", False),
        ("org/na me", False),
        ("org/x.safetensors", False),
        ("x" * 5000 + "/y", False),
    ],
)
def test_what_may_be_a_name_of_the_hub(name: str, is_one: bool):
    assert hub_names.is_name(name) is is_one


def test_which_weights_are_fetched():
    def wanted(files, index=None):
        return hub_names.weight_files("r", [*files, *([INDEX] if index else [])], lambda: index)

    index = {"weight_map": {"a": "1.safetensors", "b": "2.safetensors", "c": "1.safetensors"}}
    assert wanted(["model.safetensors", "consolidated.safetensors"]) == ["model.safetensors"]
    # As transformers does: the shards beside it may be older.
    assert wanted(["1.safetensors", "2.safetensors", "model.safetensors"], index) == ["model.safetensors"]
    assert wanted(["model.safetensors"], index) == ["model.safetensors"]
    assert wanted(["weights.safetensors", "sub/b.safetensors"]) == ["weights.safetensors"]
    assert wanted(["1.safetensors", "2.safetensors", "3.safetensors"], index) == [
        "1.safetensors",
        "2.safetensors",
    ]
    for files, names, line in (
        (["a.safetensors", "b.safetensors"], None, "2 safetensors files and no"),
        (["x.bin"], None, "pickles"),
        ([], None, "no complete model"),
        (["1.safetensors"], index, "lacks 1 of 2 shards that .* names: '2.safetensors'"),
        (["1.safetensors"], {"weight_map": ["*"]}, "has no weight_map"),
        (["sub/1.safetensors"], {"weight_map": {"a": "sub/1.safetensors"}}, "outside its folder"),
        (["1.safetensors"], {"weight_map": {f"{i}": f"{i}" * 300 for i in range(90)}}, "and 81 more"),
    ):
        with pytest.raises(UserError, match=line):
            wanted(files, names)


def test_python_and_the_command_line_write_with_a_model_of_the_hub(hub: Hub, folders: Path, tmp_path: Path):
    from test_weights_gguf import write_gguf

    gguf = write_gguf(tmp_path / "tiny.gguf", LLAMA, host_params(LLAMA))
    hub.repositories["org/tiny"].revisions["main"]["tiny.gguf"] = gguf.read_bytes()
    done = hub.run(tmp_path, "-c", GENERATE, str(folders / "v2"))
    assert done.returncode == 0, done.stderr
    main, v2, local, of_gguf = done.stdout.splitlines()
    assert v2 == local != main and of_gguf == main and main.endswith(" float32")
    assert "Getting org/tiny (" in done.stderr

    words = ("generate", "hello", "--raw", "--json", "--max-tokens=6", "--ignore-eos", "--max-model-len=32")
    done = hub.run(tmp_path, "-m", "jaxlamina", *words, "--model=org/tiny", "--revision=v2")
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert record["model"] == "org/tiny"
    assert " ".join(map(str, record["outputs"][0]["outputs"][0]["token_ids"])) == v2.removesuffix(" float32")
    assert record["dtype"] == "float32"

    # Over ranks: fetched once, before any rank waits for it.
    home = tmp_path / "ranks"
    home.mkdir()
    hub.requests.clear()
    job = (
        "launch",
        "--dop",
        "1,1",
        "--model",
        "org/tiny",
        "--set",
        "revision=v2",
        "--set",
        "model_platform=cpu",
    )
    job += ("--set", "attention_platform=cpu", "--", *words)
    over_ranks = hub.run(home, "-m", "jaxlamina", *job)
    assert over_ranks.returncode == 0, over_ranks.stderr
    outputs = json.loads(over_ranks.stdout)["outputs"]
    assert outputs[0]["outputs"][0]["token_ids"] == record["outputs"][0]["outputs"][0]["token_ids"]
    assert sum(path.startswith("/cdn/") and method == "GET" for method, path, _ in hub.requests) == 1
