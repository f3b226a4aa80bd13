"""The exactness gate: real KV through every way to run a model on this machine's GPUs, against numbers of a
CPU.

    python tests/gpu_gate.py [--platform cpu --scale small] [--groups unsplit,ranks] [--record
    docs/gpu-gate.md]

Runs the groups of `gpu_gate_cases` that this machine has the GPUs for, each in processes of its own with a
deadline. A case that dies or says nothing more costs its process, and the cases after it get another one.
What each gave is compared with the reference: the demo model's by transformers (`gpu_gate_reference`), random
models' by a whole sequence at once. Ends with a line of JSON and with 1 if any case failed or did not run.
Knows processes, files and numbers; no JAX.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gpu_gate_cases as cases
import numpy as np
from gpu_gate_cases import Case, Group

from launch.commands import mpirun_argv
from launch.local import free_ports

ROOT = Path(__file__).resolve().parents[1]
JOB = Path(__file__).with_name("gpu_gate_job.py")
DATA = Path(__file__).parent / "data" / "gpu_gate.npz"
_RESTARTS = 3  # of a group's processes, each after a case that did not end well
_POLL_S = 0.2


@dataclasses.dataclass
class Result:
    """Of one case. ``figures`` and ``limits`` by name; ``error`` where there are none."""

    group: str
    case: Case
    figures: dict[str, float] = dataclasses.field(default_factory=dict)
    limits: dict[str, float] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0
    error: str = ""

    @property
    def passed(self) -> bool:
        """Every figure that has a limit is within it; what is no number is not."""
        within = [abs(self.figures.get(name, math.nan)) <= limit for name, limit in self.limits.items()]
        return not self.error and bool(within) and all(within)


# --- judging: plain numbers ---


def judged(
    group: str, case: Case, found: Mapping[str, Any], reference: Mapping[str, Any], of_same: Any
) -> Result:
    """``of_same``: what the same case gave unsplit, or None."""
    result = Result(group, case, seconds=float(found["seconds"]))
    if case.how == "tokens":
        result.figures, result.limits = _of_tokens(case, found, reference)
        return result
    logprobs, scored = np.asarray(found["logprobs"], np.float64), np.asarray(found["scored"], bool)
    n = int(scored.sum())
    limits, mean = cases.limits_of(case, n), _mean(logprobs, scored)
    if case.how == "long":
        wanted = -math.log(cases.LONG_PERPLEXITY[len(logprobs), logprobs.shape[1] + 1])
    else:
        expected = np.asarray(reference["logprobs"], np.float64)[: len(logprobs), : logprobs.shape[1]]
        wanted = _mean(expected, scored)
        off = np.abs(logprobs - expected)[scored]
        result.figures |= {
            "token": float(off.max(initial=0.0)),
            "rms": float(np.sqrt((off**2).mean())) if n else math.nan,
        }
        result.limits |= {"token": limits.token, "rms": limits.rms}
    result.figures |= {"n_tokens": n, "perplexity": math.exp(-mean), "relative": math.expm1(wanted - mean)}
    result.limits["relative"] = limits.relative
    if of_same is not None:
        result.figures["unsplit"] = math.expm1(
            _mean(np.asarray(of_same["logprobs"], np.float64), scored) - mean
        )
        result.limits["unsplit"] = limits.unsplit
    return result


def _mean(logprobs: np.ndarray, scored: np.ndarray) -> float:
    return float(logprobs[scored].mean()) if scored.any() else math.nan


def _of_tokens(
    case: Case, found: Mapping[str, Any], reference: Mapping[str, Any]
) -> tuple[dict[str, float], dict[str, float]]:
    """Where a row first differs from the reference, that token must have been hardly likelier there than the
    next one."""
    tokens, wanted = np.asarray(found["tokens"]), np.asarray(reference["tokens"])
    wanted = wanted[: len(tokens), : tokens.shape[1]]
    n_same, margin = 0, 0.0
    for row, (a, b) in enumerate(zip(tokens, wanted, strict=True)):
        different = np.flatnonzero(a != b)
        n_same += int(different[0]) if len(different) else len(a)
        if len(different):
            margin = max(margin, float(reference["margins"][row, different[0]]))
    figures = {"n_tokens": tokens.size, "same": n_same, "margin": margin}
    if "n_moved" in found:
        figures["n_moved"] = int(found["n_moved"])
    return figures, {"margin": cases.margin_of(case)}


# --- running: processes and files ---


@dataclasses.dataclass
class Run:
    """One run of the gate: what it is asked for, and where its files are."""

    platform: str
    scale: str
    n_gpus: int
    folder: Path
    until_s: float  # by time.monotonic
    case_s: float
    environment: dict[str, str] = dataclasses.field(default_factory=dict)

    def say(self, text: str) -> None:
        print(text, flush=True)

    def file(self, group: str, case: str, suffix: str) -> Path:
        return self.folder / f"{group} - {case}{suffix}"

    @property
    def left_s(self) -> float:
        return self.until_s - time.monotonic()

    def do(self, group: Group) -> list[Result]:
        """All cases of a group, in as many processes as it takes."""
        done = [case for case in group.cases if self.file(group.name, case.name, ".npz").exists()]
        results = [self._judged(group, case) for case in done]  # by a run before this one
        left = [case for case in group.cases if case not in done]
        for turn in range(1 + _RESTARTS):
            if not left or self.left_s <= 0:
                break
            why = self._turn(group, left, turn)
            done = [case for case in left if self.file(group.name, case.name, ".npz").exists()]
            results += [self._judged(group, case) for case in done]
            left = [case for case in left if case not in done]
            if left:
                case = left.pop(0)
                error = self.file(group.name, case.name, ".error")
                results.append(Result(group.name, case, error=error.read_text() if error.exists() else why))
                self.say(f"{group.name}: {case.name}: {results[-1].error}")
        why = "not run: out of time" if self.left_s <= 0 else "not run: too many before it failed"
        return results + [Result(group.name, case, error=why) for case in left]

    def _judged(self, group: Group, case: Case) -> Result:
        found = np.load(self.file(group.name, case.name, ".npz"))
        return judged(group.name, case, found, self.reference(case.model), None)

    def reference(self, model: str) -> Any:
        return np.load(DATA if model == "demo" else self.folder / f"reference {model}.npz")

    def _turn(self, group: Group, left: Sequence[Case], turn: int) -> str:
        """Runs a group's processes until they end or are ended; why the first case without a file has
        none."""
        log = self.folder / f"{group.name} {turn}.log"
        for case in left:
            self.file(group.name, case.name, ".error").unlink(missing_ok=True)  # of a run before this one
        began = heard = time.monotonic()
        n_done, why = 0, ""
        with log.open("wb") as out:
            processes = [
                subprocess.Popen(
                    argv, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                for argv, environment in self._commands(group, left)
            ]  # fmt: skip
            try:
                while any(p.poll() is None for p in processes):
                    time.sleep(_POLL_S)
                    done = [case.name for case in left if self.file(group.name, case.name, ".npz").exists()]
                    if len(done) > n_done:
                        n_done, heard = len(done), time.monotonic()
                        self.say(f"{group.name}: {n_done} of {len(left)}, {done[-1]}, {heard - began:.0f} s")
                    if self.left_s <= 0:
                        why = "not done when the time for all was over"
                        break
                    if time.monotonic() - heard > self.case_s:
                        why = f"nothing for {self.case_s:.0f} s"
                        break
                    if any(p.poll() not in (None, 0) for p in processes):
                        time.sleep(2)  # the others notice, or are ended
                        break
            finally:
                for process in processes:
                    _end(process)
        codes = [p.returncode for p in processes]
        return why or f"ended with {codes}: {_last_line(log)}"

    def _commands(self, group: Group, left: Sequence[Case]) -> list[tuple[list[str], dict[str, str]]]:
        """Each process's command line and environment."""
        job: dict[str, Any] = {
            "group": group.name, "cases": [dataclasses.asdict(case) for case in left], "scale": self.scale,
            "platform": self.platform, "folder": str(self.folder), "n_gpus": self.n_gpus, "cluster": None,
        }  # fmt: skip
        paths = os.pathsep.join([str(ROOT), str(JOB.parent), os.environ.get("PYTHONPATH", "")])
        environment = os.environ | {"PYTHONPATH": paths} | self._gpus(group) | self.environment
        if group.cluster is None:
            return [([sys.executable, str(JOB), json.dumps(job)], environment)]
        control, coordinator = (f"127.0.0.1:{port}" for port in free_ports(2))
        more: dict[str, Any] = {"step_deadline_s": 30.0}  # a step that never ends is one failure of many
        if self.platform == "cpu":
            more = {"step_deadline_s": 240.0, "model_platform": "cpu", "attention_platform": "cpu"}
        # One batch unless a case says more: by default both are tried, and a case would not be what it is
        # named after.
        job["cluster"] = {
            "control": control, "coordinator": coordinator, "n_batches": 1,
            "local_attention": 0, **more, **group.cluster
        }  # fmt: skip
        argv, n = [sys.executable, str(JOB), json.dumps(job)], group.n_ranks
        if group.cluster.get("transport") == "mpi":
            return [([*mpirun_argv(n, "Open MPI", root=os.geteuid() == 0), *argv], environment)]
        names = "JAXLAMINA_RANK", "JAXLAMINA_LOCAL_RANK"
        return [
            (argv, environment | {name: str(i) for name in names} | {"JAXLAMINA_N_RANKS": str(n)})
            for i in range(n)
        ]

    def _gpus(self, group: Group) -> dict[str, str]:
        """Every group sees all GPUs, and every other one in another order: the first one has the most to
        do."""
        if self.n_gpus < 2 or group.alone or "CUDA_VISIBLE_DEVICES" in os.environ:
            return {}
        first = len(group.name) % self.n_gpus
        return {"CUDA_VISIBLE_DEVICES": ",".join(str((first + i) % self.n_gpus) for i in range(self.n_gpus))}

    def make_references(self, groups: Sequence[Group]) -> None:
        """Of the random models; raises if they cannot be made."""
        models = sorted({case.model for group in groups for case in group.cases} - {"demo"})
        models = [model for model in models if not (self.folder / f"reference {model}.npz").exists()]
        size = dataclasses.asdict(cases.SIZES[self.scale]["random"])
        job = {"references": dict.fromkeys(models, size), "folder": str(self.folder), "platform": "cpu"}
        if models:
            paths = os.pathsep.join([str(ROOT), str(JOB.parent), os.environ.get("PYTHONPATH", "")])
            environment = os.environ | {"PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"} | self.environment
            subprocess.run(
                [sys.executable, str(JOB), json.dumps(job)],
                env=environment,
                check=True,
                timeout=max(1.0, self.left_s),
            )


def _end(process: subprocess.Popen[bytes]) -> None:
    """A process that was started here, and what it has started: mpirun ends its ranks if it is told to."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    told = [line for line in lines if line.startswith("error") or "Error" in line]
    return (told or lines or [""])[-1][:300]


def run(run: Run, groups: Sequence[Group], n_side_by_side: int) -> list[Result]:
    """Every group: those whose ranks' kernels wait for one another first, one by one, then the others side by
    side. Random models' references are made meanwhile."""
    results: list[Result] = []
    with ThreadPoolExecutor(1) as beside, ThreadPoolExecutor(n_side_by_side) as pool:
        references = beside.submit(run.make_references, groups)

        def do(group: Group) -> list[Result]:
            if any(case.model != "demo" for case in group.cases):
                references.result()
            return run.do(group)

        for group in groups:
            if group.alone:
                results += do(group)
        demo_first = sorted((g for g in groups if not g.alone), key=lambda g: g.cases[0].model != "demo")
        for found in pool.map(do, demo_first):
            results += found
    _beside_unsplit(run, results)
    return results


def _beside_unsplit(run: Run, results: Sequence[Result]) -> None:
    """Holds each case to the one that ran the same unsplit, where there is one."""
    unsplit = {
        r.case.same_as: r for r in results if r.case.llm.get("split") is False and not r.error and r.figures
    }
    for r in results:
        other = unsplit.get(r.case.same_as)
        if other is None or r.error or r is other or r.case.how == "tokens":
            continue
        found, same = (np.load(run.file(x.group, x.case.name, ".npz")) for x in (r, other))
        if np.array_equal(found["scored"], same["scored"]):
            again = judged(r.group, r.case, found, run.reference(r.case.model), same)
            r.figures, r.limits = again.figures, again.limits


# --- the record ---


def described(n_gpus: int) -> dict[str, Any]:
    """What it ran on."""
    ask = (
        "import json, platform, jax, jaxlib; d = jax.devices(); print(json.dumps({'device': "
        "d[0].device_kind, 'platform': "
        "d[0].platform, 'n_devices': len(d), 'jax': jax.__version__, 'jaxlib': jaxlib.__version__, 'python': "
        "platform.python_version(), 'runtime': d[0].client.platform_version.splitlines()[-1]}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", ask], check=False, capture_output=True, text=True, timeout=120
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return json.loads(lines[-1]) if lines else {"device": "unknown", "n_devices": n_gpus}


def as_markdown(results: Sequence[Result], where: Mapping[str, Any], command: str, seconds: float) -> str:
    n_passed = sum(r.passed for r in results)
    today = datetime.datetime.now(datetime.UTC).date()
    versions = {name: where[name] for name in ("jax", "jaxlib", "python", "runtime") if name in where}
    lines = [
        "# The GPU gate's record",
        "",
        (
            "Real KV through every way to run a model, token by token, against transformers on a CPU in "
            "float32 (the demo model)"
        ),
        (
            "or a whole sequence at once in float32 (random models). Made by `make test-gpu`; what a case is "
            "and where its limits"
        ),
        "come from: `tests/gpu_gate_cases.py`.",
        "",
        (
            f"- {today}, {where.get('n_devices')} × {where.get('device')}, "
            f"{', '.join(f'{k} {v}' for k, v in versions.items())}"
        ),
        f"- `{command}`: {seconds:.0f} s",
        f"- **{n_passed} of {len(results)} cases passed**",
        "",
        (
            "Relative: the perplexity's difference from float32's. Rms, token: the root mean square and the "
            "largest of tokens'"
        ),
        (
            "log-probabilities' differences. Unsplit: the perplexity's difference from the same case "
            "unsplit. Each with its limit."
        ),
        "",
        "| group | case | covers | tokens | perplexity | relative | rms | token | unsplit | s | |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in results:
        f, limits = r.figures, r.limits

        def of(name: str, scale: float = 1.0, unit: str = "", f: Any = f, limits: Any = limits) -> str:
            if name not in f:
                return ""
            limit = f" (≤ {scale * limits[name]:.2g})" if name in limits else ""
            return f"{scale * f[name]:+.3g}{unit}{limit}"

        if r.case.how == "tokens" and f:
            told = f"{f['same']} of {f['n_tokens']} the same, margin {f['margin']:.2g} (≤ {limits['margin']:.2g})"
            columns = [str(f["n_tokens"]), told, "", "", "", ""]
        else:
            perplexity = f"{f['perplexity']:.4f}" if "perplexity" in f else r.error.splitlines()[0][:120]
            columns = [
                str(f.get("n_tokens", "")),
                perplexity,
                of("relative", 100, " %"),
                of("rms"),
                of("token"),
                of("unsplit", 100, " %"),
            ]
        verdict = "pass" if r.passed else "**FAIL**"
        cells = [r.group, r.case.name, ", ".join(r.case.covers), *columns, f"{r.seconds:.1f}", verdict]
        lines.append("| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def as_json(
    results: Sequence[Result], where: Mapping[str, Any], command: str, seconds: float
) -> dict[str, Any]:
    return {
        "where": dict(where), "command": command, "seconds": seconds,
        "n_passed": sum(r.passed for r in results), "n": len(results),
        "cases": [
            {
                "group": r.group, "case": r.case.name, "how": r.case.how, "model": r.case.model, "dtype": r.case.dtype,
                "kv_dtype": r.case.kv_dtype, "covers": r.case.covers, "figures": r.figures, "limits": r.limits,
                "seconds": round(r.seconds, 1), "error": r.error, "passed": r.passed,
            }
            for r in results
        ],
    }  # fmt: skip


def chosen(names: str, n_gpus: int, only: str = "") -> list[Group]:
    """Groups whose names contain one of ``names``, that so many GPUs can run; ``only``: those of their cases
    whose names contain one of these."""
    wanted = [name.strip() for name in names.split(";") if name.strip()]
    groups = [
        g for g in cases.GROUPS if g.n_gpus <= n_gpus and (not wanted or any(w in g.name for w in wanted))
    ]
    if parts := [part.strip() for part in only.split(";") if part.strip()]:
        kept = {g.name: tuple(c for c in g.cases if any(p in c.name for p in parts)) for g in groups}
        groups = [dataclasses.replace(g, cases=kept[g.name]) for g in groups]
    return [g for g in groups if g.cases]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--platform", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--scale", choices=tuple(cases.SIZES), default="full")
    parser.add_argument("--gpus", type=int, help="how many to use; default all that are there")
    parser.add_argument("--groups", default="", help="parts of groups' names, by semicolons; default all")
    parser.add_argument("--only", default="", help="parts of cases' names, by semicolons")
    parser.add_argument("--side-by-side", type=int, default=4, help="groups at once, where they may")
    parser.add_argument("--limit-s", type=float, default=460.0, help="for all of it")
    parser.add_argument("--case-s", type=float, default=150.0, help="without a case being done")
    parser.add_argument(
        "--folder",
        type=Path,
        help="for logs and arrays, default a temporary one; cases that it has are not run again",
    )
    parser.add_argument(
        "--record",
        type=Path,
        default=os.environ.get("JAXLAMINA_GATE_RECORD"),
        help="a .md, with a .json beside it",
    )
    args = parser.parse_args(arguments)
    began = time.monotonic()
    where = described(args.gpus or 1) if args.platform == "gpu" else {"device": "CPU", "n_devices": 0}
    n_gpus = args.gpus or (len(cases.GROUPS) if args.platform == "cpu" else int(where["n_devices"]))
    folder = args.folder or Path(tempfile.mkdtemp(prefix="jaxlamina-gate-"))
    folder.mkdir(parents=True, exist_ok=True)
    gate = Run(args.platform, args.scale, n_gpus, folder, began + args.limit_s, args.case_s)
    groups = chosen(args.groups, n_gpus, args.only)
    if args.platform == "gpu" and where.get("platform") not in ("gpu", "cuda"):
        sys.exit(f"error: no GPU here: JAX sees {where}; to rehearse: --platform cpu --scale small")
    print(
        f"{sum(len(g.cases) for g in groups)} cases in {len(groups)} groups, {where}, files in {folder}",
        flush=True,
    )
    results = run(gate, groups, args.side_by_side)
    seconds = time.monotonic() - began
    command = shlex.join(["python", "tests/gpu_gate.py", *(sys.argv[1:] if arguments is None else arguments)])
    text = as_markdown(results, where, command, seconds)
    (folder / "record.md").write_text(text)
    whole = as_json(results, where, command, seconds)
    (folder / "record.json").write_text(json.dumps(whole, indent=1))
    if args.record:
        args.record.write_text(text)
        args.record.with_suffix(".json").write_text(json.dumps(whole, indent=1) + "\n")
    print(text)
    for r in results:
        if not r.passed:
            print(f"FAIL {r.group}: {r.case.name}: {r.error or (r.figures, r.limits)}", flush=True)
    print(json.dumps({name: whole[name] for name in ("n_passed", "n", "seconds")}))
    return 0 if results and all(r.passed for r in results) else 1


if __name__ == "__main__":
    sys.exit(main())
