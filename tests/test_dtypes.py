"""dtype="auto": the checkpoint's own, float32 on CPUs; what it came to is said."""

from __future__ import annotations

import json
import logging
from functools import partial
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from checkpoint_examples import LLAMA, host_params
from safetensors.numpy import save_file
from test_weights_gguf import write_gguf

from jaxlamina import LLM, UserError
from jaxlamina.dtypes import chosen
from jaxlamina.job.cluster import Cluster
from jaxlamina.models import ModelConfig, random_params
from jaxlamina.weights import DummyCheckpoint, convert, open_checkpoint
from jaxlamina.weights.sources import InMemoryModel

small = partial(LLM, max_num_seqs=1, max_model_len=16, kv_slots=16, compilation_cache=False)


@pytest.fixture
def bfloat16_folder(tmp_path: Path) -> Path:
    """Weights in bfloat16, norms in float32, as some exports have them."""
    folder = tmp_path / "bf16"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA | {"torch_dtype": "float32"}))  # which nobody reads
    params = {
        name: x.astype(ml_dtypes.bfloat16) if x.ndim > 1 else x for name, x in host_params(LLAMA).items()
    }
    save_file(params, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("own", "on_cpu", "dtype"),
    [
        ("bfloat16", False, "bfloat16"),
        ("float32", False, "float32"),
        ("float16", False, "bfloat16"),
        (None, False, "bfloat16"),
        ("bfloat16", True, "float32"),
        ("float16", True, "float32"),
        (None, True, "float32"),
    ],
)
def test_auto(own: str | None, on_cpu: bool, dtype: str):
    found, why = chosen("auto", own, on_cpu)
    assert found == dtype and why.startswith(f"dtype={dtype}") and "\n" not in why
    for asked in ("float32", "bfloat16"):
        assert chosen(asked, own, on_cpu) == (asked, "")


def test_a_bfloat16_checkpoint_is_float32_on_a_cpu_unless_asked_and_says_so(
    bfloat16_folder: Path, monkeypatch, caplog, capsys
):
    with caplog.at_level(logging.INFO, logger="jaxlamina"):
        model = small(str(bfloat16_folder))
    line = "dtype=float32, as everything on a CPU (the weights are stored as bfloat16; dtype=bfloat16 halves the memory)"
    assert model.dtype == model.stats()["dtype"] == "float32"
    assert [record.message for record in caplog.records] == [line] == [model.why_dtype]
    assert small(str(bfloat16_folder), dtype="bfloat16").dtype == "bfloat16"
    assert capsys.readouterr().out == ""
    # An accelerator, as far as the choice is concerned.
    monkeypatch.setattr("jaxlamina.llm.is_accelerator", lambda device: True)
    model = small(str(bfloat16_folder))
    assert model.dtype == "bfloat16" and {s.dtype for s in model.executor.specs} == {jnp.dtype("bfloat16")}
    assert small(str(bfloat16_folder), dtype="float32").dtype == "float32"
    with pytest.raises(UserError, match="dtype='half' must be one of auto, float32, bfloat16"):
        small(str(bfloat16_folder), dtype="half")


def test_each_format_knows_its_own(bfloat16_folder: Path, tmp_path: Path):
    params = host_params(LLAMA)
    assert open_checkpoint(bfloat16_folder).own_dtype == "bfloat16"
    assert open_checkpoint(convert(bfloat16_folder, tmp_path / "o", to="orbax")).own_dtype == "bfloat16"
    assert open_checkpoint(write_gguf(tmp_path / "f32.gguf", LLAMA, params)).own_dtype == "float32"
    assert DummyCheckpoint("llama-3-8b").own_dtype is None
    config = ModelConfig.from_hf(LLAMA)
    assert InMemoryModel(config, random_params(config, 0, "bfloat16")).own_dtype == "bfloat16"


def test_convert_keeps_the_dtype_unless_asked(bfloat16_folder: Path, tmp_path: Path):
    kept, asked = (
        convert(bfloat16_folder, tmp_path / "k"),
        convert(bfloat16_folder, tmp_path / "a", dtype="float32"),
    )
    assert open_checkpoint(kept).own_dtype == "bfloat16" and open_checkpoint(asked).own_dtype == "float32"
    assert json.loads((kept / "config.json").read_text())["torch_dtype"] == "bfloat16"
    for name, x in open_checkpoint(kept).load().items():
        want = host_params(LLAMA)[name]
        assert np.array_equal(x, want.astype(ml_dtypes.bfloat16).astype(np.float32)), name


def test_a_cluster_says_auto():
    assert Cluster().dtype == "auto" and Cluster(dtype="bfloat16").dtype == "bfloat16"
    with pytest.raises(UserError, match="dtype='half' must be one of auto, float32, bfloat16"):
        Cluster(dtype="half")  # type: ignore[arg-type]
