"""What a server is told beside its model. Plain data, imported without FastAPI."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

SHUTDOWN_TIMEOUT_S = 30.0
CONNECTIONS_END_S = 5  # then, for answers that are complete to reach their clients
THREAD_END_S = 60.0  # and for the step, or the program being compiled, in which the engine's thread is
MAX_CONCURRENT_REQUESTS = 1024
MAX_BODY_MIB = 16


@dataclass(frozen=True)
class Settings:
    """Names as the options of `jaxlamina serve`.

    - ``served_model_names``: what requests may call the model; answers say the first.
    - ``uds``: the Unix socket to listen at, where `App.run` gets no other.
    - ``files_dir``: where files and batches are kept; None: a temporary folder.
    - ``max_body_bytes``: of a JSON request; uploads have a limit of their own.
    """

    served_model_names: tuple[str, ...]
    uds: str | None = None
    api_key: str | None = None
    max_concurrent_requests: int = MAX_CONCURRENT_REQUESTS
    max_body_bytes: int = MAX_BODY_MIB * 2**20
    shutdown_timeout_s: float = SHUTDOWN_TIMEOUT_S
    files_dir: Path | None = None
    log_level: str = "info"
    warm_up: bool = True
    warm_up_scored_prompts: bool = False
    pool_metrics_interval_s: float = 0.0
    max_num_batched_tokens: int | None = 2048
    prefix_caching: bool = True
