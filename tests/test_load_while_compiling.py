"""Prompts of all lengths from several clients while a server's programs are compiled behind: each is
answered, with the tokens that it gets once all are there.

On GPUs a program's first prompt once ended the server (docs/findings.md, "unjoined work").
"""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from checkpoint_examples import tiny_words_folder
from serving import Server, serving

N_CLIENTS = 4
N_WRITTEN = 8
# Wide enough for cuDNN's attention, deep enough for its programs to take a while to load.
SIZES = {"cuda": (1024, 12, 8, 4), "cpu": (64, 2, 4, 2)}  # hidden, layers, heads, KV heads
LONGEST = {"cuda": 1024, "cpu": 256}
RANKS = ("-m", "jaxlamina", "launch", "--dop", "1,1")


def folder_of(tmp_path: Path, platform: str) -> Path:
    folder = tiny_words_folder(tmp_path, LONGEST[platform])
    hidden, layers, heads, kv_heads = SIZES[platform]
    config = json.loads((folder / "config.json").read_text()) | {
        "hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": hidden // heads,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def answer(server: Server, n_tokens: int, first: int) -> list[int]:
    prompt = [(first + 7 * i) % 64 for i in range(n_tokens)]
    body = {"model": "m", "prompt": prompt, "max_tokens": N_WRITTEN, "temperature": 0, "ignore_eos": True}
    status, found = server.request("POST", "/v1/completions", body | {"return_token_ids": True})
    assert status == 200, (found, server.lines[-20:])
    ids: list[int] = found["choices"][0]["token_ids"]
    return ids


def load(server: Server, longest: int) -> dict[tuple[int, int], list[list[int]]]:
    """Until all programs are there; what was answered to each prompt, by its length and first token."""
    found: dict[tuple[int, int], list[list[int]]] = {}
    errors: list[BaseException] = []
    done = threading.Event()

    def client(k: int) -> None:
        try:
            turn = k
            while not done.is_set():
                # Lengths over the whole range, few enough to come again.
                n_tokens = 3 + (turn * (longest // 9)) % (longest - N_WRITTEN - 4)
                asked = n_tokens, k
                found.setdefault(asked, []).append(answer(server, n_tokens, k))
                turn += 1
        except BaseException as error:  # noqa: BLE001 (raised by the test)
            errors.append(error)

    clients = [threading.Thread(target=client, args=(k,)) for k in range(N_CLIENTS)]
    for thread in clients:
        thread.start()
    until = time.monotonic() + 400
    while not errors and time.monotonic() < until and server.process.poll() is None:
        if any("compiled all" in line for line in list(server.lines)):
            break
        time.sleep(0.2)
    done.set()
    for thread in clients:
        thread.join(120)
    if errors:
        raise errors[0]
    server.wait_for("INFO:     compiled all", 1)
    return found


@pytest.mark.parametrize(
    "platform, over_ranks",
    [
        pytest.param("cuda", False, marks=pytest.mark.gpu),
        pytest.param("cuda", True, marks=pytest.mark.multi_gpu),
        pytest.param("cpu", True, marks=pytest.mark.slow),
    ],
)
def test_every_prompt_is_answered_while_programs_are_compiled(
    tmp_path: Path, platform: str, over_ranks: bool
) -> None:
    folder, longest = folder_of(tmp_path, platform), LONGEST[platform]
    dtype = "bfloat16" if platform == "cuda" else "float32"
    sizes = {"max_num_seqs": 8, "max_model_len": longest}
    more: tuple[Any, ...]
    if over_ranks:
        given = [word for name, size in sizes.items() for word in ("--set", f"{name}={size}")]
        before = (*RANKS, "--model", str(folder), "--dtype", dtype, *given, "--")
        more = ()
    else:
        before = ("-m", "jaxlamina")
        given = [word for name, size in sizes.items() for word in (f"--{name.replace('_', '-')}", str(size))]
        more = ("--model", str(folder), "--dtype", dtype, "--no-split", *given)
    # No cache: programs are to be compiled while requests run.
    platforms = "cuda,cpu" if platform == "cuda" else platform
    cache = {"JAXLAMINA_CACHE": str(tmp_path / "cache"), "JAX_PLATFORMS": platforms}
    options = ("--load-format", "dummy", "--served-model-name", "m", "--no-enable-prefix-caching")
    with serving(*options, *more, before=before, variables=cache) as server:
        found = load(server, longest)
        assert len(found) >= N_CLIENTS and sum(map(len, found.values())) > 2 * N_CLIENTS
        if platform == "cpu":  # in float32 a batch's size decides no token of these
            for (n_tokens, first), answers in found.items():
                assert answers == [answer(server, n_tokens, first)] * len(answers), (n_tokens, first)
        assert not [line for line in server.lines if "could not be compiled" in line or "has failed" in line]
