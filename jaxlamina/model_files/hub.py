"""Models of the Hugging Face Hub: `org/name` to a folder, `org/name:file.gguf` to a file, in
`huggingface_hub`'s cache.

What to fetch of a repository is decided here. Fetching, its cache, resuming, HF_TOKEN, HF_ENDPOINT and
HF_HUB_OFFLINE are the library's, which is imported when a name is first looked up.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jaxlamina.errors import UserError
from jaxlamina.model_files import demo
from jaxlamina.models.config import ModelConfig

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
CONFIG = "config.json"
# What is needed beside weights, as far as a repository has it; the last two only tell why there is no
# tokenizer.json.
SIDE_FILES = (
    *(CONFIG, "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("special_tokens_map.json", "chat_template.jinja", INDEX_NAME, "vocab.json", "tokenizer.model"),
)
_PART = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?"
_NAME = re.compile(rf"({_PART}/{_PART})(?::([^:\0]+\.gguf))?")
_TOKEN = "set HF_TOKEN, or run: hf auth login"
_ASK_S = 10.0  # for the Hub to say what a repository has
# Errors of code, not of the network: all that the client's HTTP library raises differs by version.
_BUGS = (NameError, AttributeError, TypeError, AssertionError, LookupError)
_NO_REPOSITORIES = (".gguf", ".json", ".toml", ".safetensors")


def is_name(text: str) -> bool:
    """Whether ``text`` may name a repository, or a GGUF file of one."""
    match = _NAME.fullmatch(text)
    return match is not None and not match.group(1).endswith(_NO_REPOSITORIES)


def fetch(name: str, revision: str | None = None, *, weights: bool = True) -> Path:
    """What ``name`` (`is_name`) stands for, in the cache; only what is not there yet is fetched.

    ``UserError``, one line, for a repository, revision or file that is not there or not open to this user,
    for one without weights that can be read, and where the Hub cannot be reached and the cache lacks it.
    """
    match = _NAME.fullmatch(name)
    assert match is not None
    repository, file = match.groups()
    with _in_one_line(name, repository, revision):
        try:
            sizes = _listing(repository, revision)
        except _Unreachable as unreachable:
            try:
                return _cached(repository, file, revision, weights)
            except FileNotFoundError:
                raise UserError(_not_cached(name, str(unreachable))) from None
        if file is not None:
            if file not in sizes:
                raise UserError(f"{repository} has no file {file!r}{_ggufs(repository, sizes)}")
            return _file(repository, file, revision, sizes[file])
        if CONFIG not in sizes:
            no_model = " and no config.json: it is no model in transformers' format"
            raise UserError(f"{repository} has no safetensors{_ggufs(repository, sizes) or no_model}")
        wanted = [path for path in SIDE_FILES if path in sizes]
        folder = _snapshot(repository, revision, wanted)
        if weights:
            ModelConfig.from_hf(_read(folder / CONFIG))  # what is not supported is said before gigabytes come
            files = weight_files(repository, sizes, lambda: _read(folder / INDEX_NAME))
            missing = [path for path in files if not (folder / path).exists()]
            if missing:
                _say(repository, sum(sizes[path] for path in missing))
                # By the commit, so that a push in between cannot mix two versions.
                _snapshot(repository, folder.name, missing)
        return folder


def weight_files(
    where: str | Path, files: Collection[str], index: Callable[[], Mapping[str, Any]]
) -> list[str]:
    """Which of ``files``, a folder's or a repository's, hold the weights, as transformers looks for them:
    ``model.safetensors``, else those that ``index``, the file of that name, names, else the only one.

    ``UserError`` that says what there is instead.
    """
    if SINGLE_NAME in files:
        return [SINGLE_NAME]
    if INDEX_NAME in files:
        return _shards(where, files, index().get("weight_map"))
    found = sorted(path for path in files if path.endswith(".safetensors") and "/" not in path)
    if len(found) == 1:
        return found
    if found:
        raise UserError(
            f"{where} has {len(found)} safetensors files and no {INDEX_NAME}: fetch the index too, or take "
            "another revision"
        )
    if any(path.endswith((".bin", ".pth", ".pt")) for path in files):
        raise UserError(
            f"{where} has PyTorch pickles and no safetensors, which are not read: save it again with "
            "transformers' save_pretrained(safe_serialization=True), or look for a copy in safetensors or "
            "GGUF"
        )
    raise UserError(
        f"{where} has a config.json and no *.safetensors: it is no complete model; fetch the weights too"
    )


def _shards(where: str | Path, files: Collection[str], weight_map: Any) -> list[str]:
    given = list(weight_map.values()) if isinstance(weight_map, dict) else []
    if not given or not all(isinstance(name, str) for name in given):
        raise UserError(
            f"{where}: {INDEX_NAME} has no weight_map from tensor names to files: fetch it again, or take "
            "another revision"
        )
    shards = sorted(set(given))
    outside = [name for name in shards if "/" in name]
    if outside:
        raise UserError(f"{where}: {INDEX_NAME} names files outside its folder: {_few(outside)}")
    missing = [name for name in shards if name not in files]
    if missing:
        raise UserError(
            f"{where} lacks {len(missing)} of {len(shards)} shards that its {INDEX_NAME} names: "
            f"{_few(missing)}; fetch them, or take another revision"
        )
    return shards


def _few(names: Sequence[str]) -> str:
    more = [f"and {len(names) - 9} more"] if len(names) > 9 else []
    return ", ".join([*(repr(name[:100]) for name in names[:9]), *more])


def _snapshot(repository: str, revision: str | None, files: list[str]) -> Path:
    """The folder with ``files`` in it."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import tqdm

    class Bar(tqdm):  # type: ignore[misc]
        """The library's, on a terminal only."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options | ({} if sys.stderr.isatty() else {"disable": True}))

    return Path(snapshot_download(repository, revision=revision, allow_patterns=files, tqdm_class=Bar))


def _file(repository: str, file: str, revision: str | None, n_bytes: int) -> Path:
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    if not isinstance(try_to_load_from_cache(repository, file, revision=revision), str):
        _say(repository, n_bytes)
    return Path(hf_hub_download(repository, file, revision=revision))


class _Unreachable(Exception):
    """The Hub cannot be asked, and why; the cache may do."""


def _listing(repository: str, revision: str | None) -> dict[str, int]:
    """Bytes of each of the repository's files."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    try:
        info = HfApi().model_info(repository, revision=revision, files_metadata=True, timeout=_ASK_S)
    except OfflineModeIsEnabled:
        raise _Unreachable("HF_HUB_OFFLINE is set") from None
    except HfHubHTTPError as error:
        if error.response.status_code < 500:
            raise
        raise _Unreachable(_answered(error)) from None
    except (HFValidationError, *_BUGS):
        raise
    except Exception as error:  # noqa: BLE001 (see _BUGS)
        raise _Unreachable(f"{_hub()} cannot be reached ({_first(error)})") from None
    return {file.rfilename: file.size or 0 for file in info.siblings or ()}


def _cached(repository: str, file: str | None, revision: str | None, weights: bool) -> Path:
    """What the cache has; ``FileNotFoundError`` if that is not all."""
    from huggingface_hub import hf_hub_download, snapshot_download

    if file is not None:
        return Path(hf_hub_download(repository, file, revision=revision, local_files_only=True))
    options: dict[str, Any] = {"local_files_only": True, "allow_patterns": [CONFIG]}
    folder = Path(snapshot_download(repository, revision=revision, **options))
    files = {path.name for path in folder.iterdir()}
    if CONFIG not in files:
        raise FileNotFoundError(CONFIG)
    if weights:
        try:
            weight_files(repository, files, lambda: _read(folder / INDEX_NAME))
        except UserError as error:  # the rest may have been left out when it was fetched
            raise FileNotFoundError(str(error)) from None
    return folder


def _say(repository: str, n_bytes: int) -> None:
    """The library draws bars on terminals only."""
    print(f"Getting {repository} ({n_bytes / 1e6:,.1f} MB) from {_hub()}", file=sys.stderr, flush=True)


def _ggufs(repository: str, files: Collection[str]) -> str:
    found = sorted(path for path in files if path.endswith(".gguf"))
    more = f" and {len(found) - 8} more" if len(found) > 8 else ""
    named = (
        f", but GGUF files, {', '.join(found[:8])}{more}: name one, as {repository}:{found[0]}"
        if found
        else ""
    )
    return named


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"{path} cannot be read as JSON ({error}): remove it, and it is fetched again"
        ) from None
    if not isinstance(value, dict):
        raise UserError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


@contextmanager
def _in_one_line(name: str, repository: str, revision: str | None) -> Iterator[None]:
    """Turns what the library raises into a `UserError` that says what to do."""
    from huggingface_hub import constants, errors

    try:
        yield
    except (UserError, *_BUGS):
        raise
    except errors.GatedRepoError:
        raise UserError(
            f"{repository} is gated: ask for access at {_hub()}/{repository}, then {_TOKEN}"
        ) from None
    except errors.RepositoryNotFoundError:
        raise UserError(_no_repository(name, repository)) from None
    except errors.RevisionNotFoundError:
        raise UserError(
            f"{repository} has no revision {revision!r}: see {_hub()}/{repository}/commits"
        ) from None
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        is_refused = "Invalid credentials" in str(error.server_message or error)
        if status in (401, 404) and not is_refused:
            raise UserError(_no_repository(name, repository)) from None
        advice = "check HF_TOKEN" if status in (401, 403) else "try again later"
        raise UserError(f"{_answered(error)} for {repository}: {advice}") from None
    except errors.HFValidationError as error:
        raise UserError(f"unknown model {name!r}: {_first(error)}") from None
    except OSError as error:
        if error.errno is None or isinstance(error, ConnectionError):
            raise UserError(_broken_off(repository, error)) from None
        raise UserError(f"cannot keep {repository} in {constants.HF_HUB_CACHE}: {error.strerror}") from None
    except Exception as error:  # noqa: BLE001 (see _BUGS)
        raise UserError(_broken_off(repository, error)) from None


def _no_repository(name: str, repository: str) -> str:
    return (
        f"unknown model {name!r}: there is no such folder here, and {_hub()} has no {repository}, or none "
        f"that you may "
        f"see: check the name (known without the Hub: {', '.join(demo.NAMES)}); for a private one {_TOKEN}"
    )


def _hub() -> str:
    from huggingface_hub import constants

    return str(constants.ENDPOINT)


def _answered(error: Any) -> str:
    return f"{_hub()} answered {error.response.status_code} ({error.server_message or _first(error)})"


def _not_cached(name: str, why: str) -> str:
    from huggingface_hub import constants

    return (
        f"unknown model {name!r}: there is no such folder here, {why}, and {constants.HF_HUB_CACHE} does "
        f"not have all of it; known without the Hub: {', '.join(demo.NAMES)}"
    )


def _broken_off(repository: str, error: Exception) -> str:
    what = f"{repository} did not come whole from {_hub()} ({_first(error)})"
    return f"{what}: run it again, which goes on from there"


def _first(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:200].rstrip(".")
