"""Timelines as a file for https://ui.perfetto.dev and chrome://tracing: Chrome's trace format, compressed.

A process shows the steps, and one is each rank: a thread of its spans and bubbles, and where it has several
streams one more for each. Both viewers colour by name, Perfetto without the numbers in it, so kinds have
colours. Knows timelines and the format, and nothing of how they came about.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxlamina.console.outputs import check_output
from jaxlamina.errors import UserError
from jaxlamina.profiling.spans import Span
from jaxlamina.profiling.timeline import Timeline
from jaxlamina.transports.scopes import Kind

# chrome://tracing's own names of colours.
_COLORS: dict[Kind, str] = {
    "model": "thread_state_running",
    "attention": "thread_state_iowait",
    "exchange": "thread_state_runnable",
    "other": "generic_work",
    "bubble": "white",
}
_STEPS = 1  # the first thread's number


def check(path: Path, option: str) -> None:
    """`UserError`, naming the option that ``path`` was given by, if `write` could not write it."""
    if not path.name.endswith((".json", ".json.gz")):
        raise UserError(f"{option} {str(path)!r} must end in .json or .json.gz")
    check_output(path, option)


def write(parts: Mapping[str, Timeline], path: Path) -> None:
    """Timelines, by what they are of, one after another in one file; ``path`` ends in ``.json`` or
    ``.json.gz``."""
    began_ns = min(timeline.windows[0][0] for timeline in parts.values())
    document = {
        "traceEvents": list(_all(parts, began_ns)),
        "displayTimeUnit": "ns",
        # Times in the file are from here: microseconds since 1970 would be rounded.
        "otherData": {"began_unix_ns": str(began_ns)},
    }
    text = json.dumps(document, separators=(",", ":")).encode()
    path.write_bytes(gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)


def title(span: Span) -> str:
    """What a span is called: ``slice 3, batch 1``."""
    kind, number, batch = span.scope
    if number < 0:
        return kind
    return f"{'slice' if kind == 'model' else kind} {number}, batch {batch}"


def _all(parts: Mapping[str, Timeline], began_ns: int) -> Iterator[dict[str, Any]]:
    traces = {t.rank: t for timeline in parts.values() for t in timeline.traces}
    for rank, trace in sorted(traces.items()):
        yield _meta("process_name", rank, 0, name=trace.name)
        yield _meta("process_sort_index", rank, 0, sort_index=rank + 1)
        n_streams = max(len(t.streams) for part in parts.values() for t in part.traces if t.rank == rank)
        yield _meta("thread_name", rank, _STEPS, name="steps")
        for n in range(n_streams if n_streams > 1 else 0):
            yield _meta("thread_name", rank, _STEPS + 1 + n, name=f"stream {n}")
    yield _meta("process_name", len(traces), 0, name="steps")
    yield _meta("process_sort_index", len(traces), 0, sort_index=0)
    for what, timeline in parts.items():
        for step, (start, end) in enumerate(timeline.windows):
            yield {
                "ph": "X", "name": what, "cat": "step", "pid": len(traces), "tid": 0,
                "ts": (start - began_ns) / 1e3, "dur": (end - start) / 1e3, "args": {"step": step},
            }  # fmt: skip
        for trace in timeline.traces:
            for step, spans in enumerate(timeline.lines[trace.rank]):
                yield from _spans(spans, began_ns, trace.rank, _STEPS, what, step)
            for n, line in enumerate(trace.streams.values() if len(trace.streams) > 1 else ()):
                for step, (start, end) in enumerate(timeline.windows):
                    inside = (x for x in line if start <= x.start_ns < end)
                    yield from _spans(inside, began_ns, trace.rank, _STEPS + 1 + n, what, step)


def _spans(
    line: Iterable[Span], began_ns: int, rank: int, thread: int, what: str, step: int
) -> Iterator[dict[str, Any]]:
    for span in line:
        args: dict[str, Any] = {"of": what, "kind": span.scope.kind, "step": step}
        if span.scope.number >= 0:
            args |= {"index": span.scope.number, "batch": span.scope.batch}
        yield {
            "ph": "X", "name": title(span), "cat": span.scope.kind, "pid": rank, "tid": thread,
            "ts": (span.start_ns - began_ns) / 1e3, "dur": span.duration_ns / 1e3,
            "cname": _COLORS[span.scope.kind], "args": args,
        }  # fmt: skip


def _meta(what: str, rank: int, thread: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": rank, "tid": thread, "args": args}
