"""What a supervisor is told. Plain data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from jaxlamina.errors import UserError
from jaxlamina.options import Options, definitions, option, seconds


@dataclass(frozen=True)
class Supervision(Options):
    """Options of `jaxlamina serve` about the process that outlives the server proper."""

    supervise: bool | None = option(
        None,
        "Run the server, and its ranks, below a process that starts them again when one of them dies or "
        "hangs; requests go on after the tokens that they have. Default: over ranks yes, one process no.",
    )
    journal: Path | None = option(
        None,
        "With --supervise: the folder where requests and their tokens are kept, to go on also after the end "
        "of the supervisor or the machine. Default: none are.",
    )
    spare: int = option(
        0,
        "With --supervise: 1 keeps a second server ready, with weights and programs in memory, which takes "
        "over at once. It needs as much memory again. 0: the next start has its imports, and no more.",
        least=0,
        most=1,
    )
    stuck_after: float = seconds(
        30.0, "With --supervise: seconds without an answer after which a server is held to be stuck.", least=1
    )
    step_timeout: float = seconds(
        600.0,
        "With --supervise: seconds that a step may take, with what it compiles, before its server is held to "
        "be stuck.",
        least=1,
    )
    start_timeout: float = seconds(
        3600.0, "With --supervise: seconds in which a start must be ready for requests.", least=1
    )
    recovery_timeout: float = seconds(
        600.0,
        "With --supervise: seconds that a request waits for a server that takes it, and that starts which "
        "fail are tried again.",
        least=1,
    )

    def check_alone(self) -> None:
        """`UserError` for an option of which a server without a supervisor knows nothing."""
        for name, definition in definitions(Supervision).items():
            if name != "supervise" and getattr(self, name) != definition.default:
                flag = f"--{name.replace('_', '-')}"
                raise UserError(f"{flag} is for a supervised server: add --supervise, or leave {flag} out")
