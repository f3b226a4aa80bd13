"""Model shapes in configs/: every file is read, published parameter counts come out, bad files are one
line."""

from __future__ import annotations

import json

import pytest

from jaxlamina.errors import UserError
from jaxlamina.models import abstract_params
from jaxlamina.models.config_files import configs_dir, find_model, model_config, model_names

# Of the papers and model cards, in parameters.
PUBLISHED = {
    "smollm2-135m": 134_515_008,
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama-33b": 32_528_943_616,
    "llama-65b": 65_285_660_672,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "opt-6.7b": 6_658_473_984,
    "opt-13b": 12_853_473_280,
    "opt-30b": 29_974_540_288,
}


def test_every_file_is_a_model_and_has_the_published_number_of_parameters():
    assert set(model_names()) == set(PUBLISHED)
    for name, n_params in PUBLISHED.items():
        shapes = abstract_params(model_config(name), "bfloat16")
        assert sum(leaf.size for leaf in shapes.values()) == n_params, name


def test_names_in_any_case_and_paths():
    path = configs_dir() / "models" / "llama-3-8b.toml"
    assert find_model("LLaMA-3-8B") == find_model(str(path)) == path
    assert model_config(path) == model_config("llama-3-8b")
    assert find_model("no-such.toml") is None and find_model("smollm2-135m-instruct") is None


def test_a_config_json_does_too(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(model_config("llama-7b").to_hf()))
    assert model_config(tmp_path / "config.json") == model_config("llama-7b")


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(
        UserError, match="no model shape 'llama-9b'; known: llama-13b, llama-2-13b, .*smollm2"
    ):
        model_config("llama-9b")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model_type = ", "is not TOML"),
        ('colour = "red"\n', "colour"),
        ("hidden_size = 'wide'\n", "hidden_size"),
    ],
)
def test_bad_files_are_one_line_that_names_the_file(tmp_path, text, message):
    path = tmp_path / "mine.toml"
    good = (configs_dir() / "models" / "llama-7b.toml").read_text()
    if "=" in text and message not in good:
        text = good + text
    elif message in good:
        text = "".join(line for line in good.splitlines(True) if not line.startswith(message)) + text
    path.write_text(text)
    with pytest.raises(UserError) as error:
        model_config(path)
    assert str(path) in str(error.value) and message in str(error.value) and "\n" not in str(error.value)


def test_json_that_is_no_table(tmp_path):
    path = tmp_path / "config.json"
    path.write_text("[1, 2]")
    with pytest.raises(UserError, match="must hold a table of fields, not a list"):
        model_config(path)
