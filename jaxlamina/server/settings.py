"""What a server is told beside its model. Plain data, imported without FastAPI."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

SHUTDOWN_TIMEOUT_S = 30.0
CONNECTIONS_END_S = 5  # then, for answers that are complete to reach their clients
THREAD_END_S = 60.0  # and for the step, or the program being compiled, in which the engine's thread is
COMPILING_END_S = 0.5  # and for one that is compiled behind, which nobody waits for
LAST_WORDS_S = 1.0  # of a job that has failed, to its clients
MAX_CONCURRENT_REQUESTS = 1024
MAX_BODY_MIB = 16
MAX_GRAMMAR_BYTES = 256 * 1024
GRAMMAR_TIMEOUT_S = 10.0
MAX_CONNECTIONS = 4096
CLIENT_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Settings:
    """Names as the options of `jaxlamina serve`.

    - ``served_model_names``: what requests may call the model; answers say the first.
    - ``uds``: the Unix socket to listen at, where `App.run` gets no other.
    - ``files_dir``: where files and batches are kept; None: a temporary folder.
    - ``warm_up``: compile programs before requests come: the few that serve every request before the first, the others
      behind, or with ``wait_for_all`` all before the first.
    - ``profile_after_s``: after the first step, when ``profile_s`` are recorded; 0: never.
    - ``trust_request_chat_template``, ``tool_call_parser``, ``reasoning_parser``: as of `Prompts`.
    - ``max_body_bytes``: of a JSON request; uploads have a limit of their own.
    - ``max_grammar_bytes``, ``grammar_timeout_s``: of what an output must follow, and for compiling it.
    - ``max_connections``; ``client_timeout_s``: for a request's head, between pieces of its body, and for taking in answers.
    """

    served_model_names: tuple[str, ...]
    uds: str | None = None
    api_key: str | None = None
    max_concurrent_requests: int = MAX_CONCURRENT_REQUESTS
    max_body_bytes: int = MAX_BODY_MIB * 2**20
    max_grammar_bytes: int = MAX_GRAMMAR_BYTES
    grammar_timeout_s: float = GRAMMAR_TIMEOUT_S
    max_connections: int = MAX_CONNECTIONS
    client_timeout_s: float = CLIENT_TIMEOUT_S
    shutdown_timeout_s: float = SHUTDOWN_TIMEOUT_S
    files_dir: Path | None = None
    trust_request_chat_template: bool = False
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    log_level: str = "info"
    warm_up: bool = True
    wait_for_all: bool = False
    warm_up_scored_prompts: bool = False
    pool_metrics_interval_s: float = 0.0
    profile_after_s: float = 0.0
    profile_s: float = 3.0
    max_num_batched_tokens: int | None = 2048
    prefix_caching: bool = True
