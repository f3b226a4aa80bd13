"""What a server's `/metrics` say, before and after what is measured. Knows Prometheus' text form, and vLLM's
names and this project's; nothing of what is asked meanwhile."""

from __future__ import annotations

from contextlib import suppress

from jaxlamina.server.client import Client


class Numbers:
    """What a server's ``/metrics`` say; the difference of two is of the time between them."""

    def __init__(self, text: str) -> None:
        self._values: dict[str, float] = {}
        for line in text.splitlines():
            name, _, value = line.rpartition(" ")
            if not line.startswith("#") and "_bucket{" not in line:
                with suppress(ValueError):  # another project's server may say anything there
                    self._values[name.partition("{")[0]] = float(value)

    @classmethod
    def of(cls, client: Client) -> Numbers:
        return cls(client.content("/metrics").decode(errors="replace"))

    def get(self, name: str) -> float:
        """0 where the server does not say."""
        return self._values.get(name, 0.0)

    def since(self, before: Numbers, name: str) -> float:
        return self._values[name] - before._values[name]

    def engine_latency_s(self, before: Numbers) -> float | None:
        """Mean of the requests finished since then, in the engine's thread."""
        name = "vllm:e2e_request_latency_seconds"
        n = self.since(before, f"{name}_count")
        return self.since(before, f"{name}_sum") / n if n else None

    def batch(self, before: Numbers) -> float | None:
        n_steps = self.since(before, "jaxlamina:engine_steps_total")
        return self.since(before, "vllm:generation_tokens_total") / n_steps if n_steps else None

    def host_ms(self, before: Numbers) -> float | None:
        """Milliseconds that the host was at work for each program launched since then; None where there was
        none, and of a server that does not say or was started again meanwhile."""
        try:
            n = self.since(before, "jaxlamina:launches_total")
            busy_s, wait_s = (self.since(before, f"jaxlamina:{x}_seconds_total") for x in ("busy", "wait"))
        except KeyError:
            return None
        return 1e3 * (busy_s - wait_s) / n if n > 0 and busy_s >= wait_s else None
