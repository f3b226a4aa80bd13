"""Orbax folders: written by convert, restored straight to the target; broken folders are one line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_examples import LLAMA, OPT, byte_tokenizer, host_params, write_folder

from jaxlamina.errors import UserError
from jaxlamina.weights import convert, open_checkpoint
from jaxlamina.weights.orbax_io import write_orbax


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("orbax")
    source = write_folder(root / "m", LLAMA, host_params(LLAMA), tokenizer=byte_tokenizer())
    return convert(source, root / "o", to="orbax", dtype="float32")


def test_round_trip(folder):
    params = host_params(LLAMA)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.kind == "orbax"
    seen: list[tuple[int, int]] = []
    loaded = checkpoint.load("float32", progress=lambda done, total: seen.append((done, total)))
    assert loaded.keys() == params.keys()
    for name, x in params.items():
        np.testing.assert_array_equal(np.asarray(loaded[name]), x, err_msg=name)
    total = sum(x.nbytes for x in params.values())
    assert seen[0] == (0, total) and seen[-1] == (total, total)
    assert checkpoint.tokenizer().encode("A</s>") == [65, 257]
    assert checkpoint.eos_token_ids == (257,)


def test_opt_goes_through_too(tmp_path):
    params = host_params(OPT)
    target = convert(write_folder(tmp_path / "m", OPT, params), tmp_path / "o", to="orbax")
    checkpoint = open_checkpoint(target)
    for name, x in checkpoint.load().items():
        np.testing.assert_array_equal(np.asarray(x), params[name], err_msg=name)
    with pytest.raises(UserError, match=r"no tokenizer\.json"):
        checkpoint.tokenizer()
    assert checkpoint.eos_token_ids == (2,)


def test_restores_in_another_dtype_and_onto_a_sharding(folder):
    params = host_params(LLAMA)
    sharding = jax.sharding.NamedSharding(jax.make_mesh((1,), ("x",)), jax.sharding.PartitionSpec())
    for name, x in open_checkpoint(folder).load("bfloat16", sharding).items():
        assert x.dtype == jnp.bfloat16 and x.sharding == sharding
        np.testing.assert_array_equal(np.asarray(x), params[name].astype(jnp.bfloat16), err_msg=name)


def written(folder, change):
    """A model whose last norm is another array."""
    params = {name: jnp.asarray(x) for name, x in host_params(LLAMA).items()}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    write_orbax(folder, params | {"model.norm.weight": change(params["model.norm.weight"])})
    return folder


@pytest.mark.parametrize("kind", ["int8", "int32", "bool", "complex64", "float8_e4m3fn"])
def test_weights_that_are_no_floats_are_an_error(tmp_path, kind):
    with pytest.raises(UserError, match=f"stores weights as {kind}, which is not supported"):
        open_checkpoint(written(tmp_path / "o", lambda x: x.astype(kind)))


@pytest.mark.parametrize("value, dtype", [(1e6, "float16"), (-3.4e38, "bfloat16")])
def test_a_weight_too_large_for_a_dtype_is_an_error(tmp_path, value, dtype):
    folder = written(tmp_path / "o", lambda x: x.at[3].set(value))
    with pytest.raises(UserError, match=f"too large for {dtype}; use .*float32"):
        open_checkpoint(folder).load(dtype)
    with pytest.raises(UserError, match=f"too large for {dtype}; use .*float32"):
        convert(folder, tmp_path / "s", dtype=dtype)
    assert open_checkpoint(folder).load("float32")["model.norm.weight"][3] == np.float32(value)


SHARDED = """
import sys, jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxlamina.weights import open_checkpoint
sharding = NamedSharding(jax.make_mesh((2,), ("x",)), PartitionSpec("x"))
orbax, plain = (open_checkpoint(path) for path in sys.argv[1:])
expected = plain.load("float32", jax.devices()[1])
assert all(x.devices() == {jax.devices()[1]} for x in expected.values())
for checkpoint in (orbax, plain):
    loaded = checkpoint.load("float32", sharding)
    assert loaded.keys() == expected.keys()
    for name, x in loaded.items():
        assert x.addressable_shards[0].data.shape[0] == x.shape[0] // 2, name
        assert np.array_equal(x, expected[name]), name
print("equal")
"""


def test_two_devices_each_get_their_half(folder):
    done = subprocess.run(
        [sys.executable, "-c", SHARDED, str(folder), str(folder.parent / "m")],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ
        | {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"},
    )
    assert done.stdout == "equal\n", done.stderr[-2000:]


def test_back_to_safetensors(folder, tmp_path):
    params = host_params(LLAMA)
    loaded = open_checkpoint(convert(folder, tmp_path / "s", to="safetensors")).load()
    assert loaded.keys() == params.keys()
    for name, x in params.items():
        np.testing.assert_array_equal(np.asarray(loaded[name]), x, err_msg=name)


def test_a_config_that_does_not_fit_lists_everything(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "o")
    hf = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(hf | {"num_hidden_layers": 1, "intermediate_size": 80}))
    with pytest.raises(UserError) as error:
        open_checkpoint(copy)
    text = str(error.value)
    assert "unexpected: model.layers.1." in text and "\n" not in text
    assert "model.layers.0.mlp.down_proj.weight is [64, 96] and must be [64, 80]" in text


def largest_file(folder):
    return max(
        (path for path in (folder / "params").rglob("*") if path.is_file()), key=lambda p: p.stat().st_size
    )


def test_lost_and_cut_files_are_listed(folder, tmp_path, capfd):
    copy = shutil.copytree(folder, tmp_path / "o")
    victim = largest_file(copy)
    size = victim.stat().st_size
    with open(victim, "r+b") as file:
        file.truncate(size // 2)
    (copy / "params" / "manifest.ocdbt").unlink()
    with pytest.raises(UserError) as error:
        open_checkpoint(copy)
    text = str(error.value)
    assert f"{victim.relative_to(copy)} ({size} bytes expected, {size // 2} present)" in text
    assert "params/manifest.ocdbt (missing)" in text and str(copy) in text and "\n" not in text
    assert capfd.readouterr().err == ""


def test_a_folder_without_the_list_of_files_loads(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "o")
    (copy / "params.files.json").unlink()
    assert open_checkpoint(copy).load().keys() == host_params(LLAMA).keys()
    (copy / "params" / "_METADATA").write_text("{")
    with pytest.raises(UserError, match="cannot be read as an Orbax checkpoint") as error:
        open_checkpoint(copy)
    assert str(copy) in str(error.value) and "\n" not in str(error.value)
