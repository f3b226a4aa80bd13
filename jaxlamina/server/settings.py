"""What a server is told beside its model. Plain data, imported without FastAPI."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jaxlamina.options import Options, option, seconds
from jaxlamina.server.reasoning import PARSERS as REASONING
from jaxlamina.server.tool_parsers import PARSERS as CALL_FORMS

SHUTDOWN_TIMEOUT_S = 30.0
GRAMMAR_TIMEOUT_S = 10.0
MAX_GRAMMAR_BYTES = 256 * 1024
CONNECTIONS_END_S = 5  # then, for answers that are complete to reach their clients
THREAD_END_S = 60.0  # and for the step, or the program being compiled, in which the engine's thread is
COMPILING_END_S = 0.5  # and for one that is compiled behind, which nobody waits for
LAST_WORDS_S = 1.0  # of a job that has failed, to its clients
MOST_TRIES = 4
"""Times that a server may end while it works at a request, or a batch's line, and has found it no token: then
that is held to be why."""


def end_s(shutdown_timeout: float) -> float:
    """How long a server may take to end once it is asked to."""
    return shutdown_timeout + CONNECTIONS_END_S + THREAD_END_S


def _parser(known: dict[str, Any], help: str, otherwise: str) -> Any:
    return option(None, f"{help}: {', '.join(known)}. Default: {otherwise}.", choices=tuple(known))


@dataclass(frozen=True)
class Settings(Options):
    """Of one server; its options are those of `jaxlamina serve`.

    - ``served_model_names``: what requests may call the model; answers say the first.
    - ``uds``: the Unix socket to listen at, where `App.run` gets no other.
    - ``supervisor``: what a supervisor proves itself by, where there is one.
    """

    served_model_names: tuple[str, ...] = ()
    uds: str | None = None
    api_key: str | None = None
    supervisor: str | None = None
    api_key_file: Path | None = option(
        None,
        "A file with the keys of which requests to /v1 must bring one, a line each; it is read again when it "
        "changes.",
    )
    ssl_certfile: Path | None = option(
        None,
        "A certificate in PEM form, with those that it is signed by: the port takes HTTPS, and nothing else.",
    )
    ssl_keyfile: Path | None = option(
        None, "Its key, where --ssl-certfile does not have it; without a passphrase."
    )
    trust_request_chat_template: bool = option(
        False,
        "Run the chat templates that requests bring: programs of theirs.",
        flag="--trust-request-chat-template",
    )
    tool_call_parser: str | None = _parser(CALL_FORMS, "How the model calls tools", "as its template says")
    reasoning_parser: str | None = _parser(
        REASONING, "Give what the model thinks apart, as reasoning_content", "as text"
    )
    warm_up: bool = option(
        True,
        "Compile the programs that serve every request first, and the others behind; or each when it is "
        "first needed.",
    )
    wait_for_all: bool = option(
        False, "Compile all programs before the first request.", flag="--wait-for-all"
    )
    warm_up_prompt_logprobs: bool = option(
        False, "Also those of echo with logprobs and prompt_logprobs.", flag="--warm-up-prompt-logprobs"
    )
    pool_metrics_interval: float = seconds(
        0.0,
        "Over ranks: seconds between decode steps that are recorded for each pool's times in /metrics. 0: "
        "none.",
        least=0,
    )
    profile_after: float = seconds(
        0.0,
        "Seconds after the first step at which it is recorded once what each rank's device does; told in "
        "the log. 0: never.",
        least=0,
    )
    profile_s: float = seconds(3.0, "Seconds that are recorded then.", least=0.1)
    dashboard: bool = option(
        False,
        "A live page at /dashboard: throughput, requests, KV slots, and each pool's work in recorded steps.",
        flag="--dashboard",
    )
    max_concurrent_requests: int = option(
        1024, "Requests answered at once; one more gets status 429.", least=1
    )
    max_body_mib: int = option(
        16, "A JSON request's largest body; uploads have a limit of their own.", least=1
    )
    max_connections: int = option(
        4096, "Connections open at once; one more is closed with status 503.", least=1
    )
    client_timeout: float = seconds(
        30.0,
        "Seconds for a request's headers, between parts of its body, or without taking in an answer.",
        least=0.1,
    )
    max_grammar_bytes: int = option(
        MAX_GRAMMAR_BYTES, "The longest schema, regular expression or choice an output is to follow.", least=1
    )
    grammar_timeout: float = seconds(
        GRAMMAR_TIMEOUT_S, "Seconds to compile it; what takes longer is refused.", least=0.1
    )
    files_dir: Path | None = option(None, "Where files and batches are kept. Default: a temporary folder.")
    shutdown_timeout: float = seconds(
        SHUTDOWN_TIMEOUT_S, "Seconds that running requests get after SIGTERM or SIGINT.", least=0
    )
    uvicorn_log_level: Literal["critical", "error", "warning", "info", "debug", "trace"] = option(
        "info", "critical, error, warning, info, debug or trace."
    )

    @property
    def max_body_bytes(self) -> int:
        return self.max_body_mib * 2**20
