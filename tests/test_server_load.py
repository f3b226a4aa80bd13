"""More streaming clients than there is room for, some of which go away: the others get a lone run's tokens,
and nothing is left behind; for a moment, and for ten minutes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import openai
import pytest
from checkpoint_examples import few_layers_folder
from serving import serving
from test_demo_model import NAME, needs_model

from jaxlamina import LLM, SamplingParams

N_CLIENTS = 64
N_PLANS = 20  # different requests
# Eight sequences that may have 96 tokens each, and KV for one and a third of them.
POOL = (
    "--kv-slots",
    "128",
    "--max-num-seqs",
    "8",
    "--max-model-len",
    "96",
    "--max-num-batched-tokens",
    "32",
    "--kv-headroom",
    "0",
)
TIE = 1e-4  # log-probabilities so near are not told apart: how a batch is summed up decides
SOAK_S = float(os.environ.get("JAXLAMINA_SOAK_S", "600"))
SOAK_SLOPE_LIMIT = 32.0  # MiB an hour
WORDS = Path(__file__).with_name("data").joinpath("wiki.test.raw.head").read_text(encoding="utf-8").split()


@dataclass
class Plan:
    """A request, and what it gets alone. ``tokens``: as text; ``margins``: by which each is the likeliest."""

    prompt: str
    max_tokens: int
    tokens: list[str] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    text: str = ""
    stop: str | None = None

    @property
    def wanted(self):
        return self.text if self.stop is None else self.text[: self.text.index(self.stop)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return few_layers_folder(tmp_path_factory.mktemp("few"))


@pytest.fixture(scope="module")
def plans(folder):
    rng = random.Random(11)
    llm = LLM(folder, max_num_seqs=5, max_model_len=256, kv_slots=700, prefix_caching=False)
    found = []
    for i in range(N_PLANS):
        n_words, at = rng.choice((2, 6, 12, 30)), rng.randrange(len(WORDS) - 30)
        plan = Plan(" ".join(WORDS[at : at + n_words]), rng.choice((4, 12, 24)))
        asked = SamplingParams(temperature=0, max_tokens=plan.max_tokens, logprobs=2)
        [out] = llm.generate(plan.prompt, asked)
        for token, entry in zip(out.token_ids, out.logprobs, strict=True):
            first, second = sorted((x.logprob for x in entry.values()), reverse=True)[:2]
            plan.tokens.append(llm.tokenizer.decode([token], skip_special_tokens=False))
            plan.margins.append(first - second)
        plan.text = out.text
        if i % 3 == 0 and len(plan.text) > 12:
            at = rng.randrange(len(plan.text) - 3)
            plan.stop = plan.text[at : at + 3]
        found.append(plan)
    return found


@dataclass
class Count:
    done: int = 0
    stopped: int = 0
    left: int = 0
    tokens: int = 0
    skipped: int = 0  # of them, those that come after a tie was decided otherwise

    def check(self, plan, tokens, text, reason):
        """``reason``: None for a stream that was left."""
        self.tokens += len(tokens)
        for i, (token, wanted) in enumerate(zip(tokens, plan.tokens, strict=False)):
            if token != wanted:
                assert plan.margins[i] < TIE, (plan, i, tokens)
                self.skipped += len(tokens) - i
                return
        if reason is None:
            assert plan.text.startswith(text)
        else:
            assert text == plan.wanted and (reason == "stop" or len(tokens) == plan.max_tokens), (plan, text)


async def ask(client, plan, leaves_after, count):
    """One stream; left after so many chunks, if at all, or before it has begun (0)."""
    asked = {"model": NAME, "prompt": plan.prompt, "max_tokens": plan.max_tokens, "temperature": 0}
    tokens, text, reason = [], "", None
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.3 if leaves_after == 0 else None):
            stream = await client.completions.create(**asked, stop=plan.stop, logprobs=0, stream=True)
            async with stream:
                n = 0
                async for chunk in stream:
                    for choice in chunk.choices:
                        tokens += choice.logprobs.tokens if choice.logprobs else []
                        text, reason = text + choice.text, choice.finish_reason or reason
                    n += 1
                    if n == leaves_after:
                        break
    count.check(plan, tokens, text, reason)
    count.done, count.left = count.done + (reason is not None), count.left + (reason is None)
    count.stopped += reason == "stop"


async def load(server, plans, rng, until):
    """All clients at once, each with one request after another for as long as ``until()`` is false, and one
    at least."""
    count = Count()
    async with openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=600
    ) as client:

        async def serve(i):
            while True:
                await ask(
                    client, plans[i % N_PLANS], rng.choice((None, None, None, None, None, 0, 1, 4)), count
                )
                i = rng.randrange(len(plans))
                if until():
                    return

        await asyncio.gather(*map(serve, range(N_CLIENTS)))
    return count


def check_that_nothing_is_left(server):
    server.wait_until(lambda: server.metric("vllm:num_requests_running") == 0)
    for name in ("kv_slots_used", "host_kv_slots_used"):
        assert server.metric(f"jaxlamina:{name}") == 0
    assert server.metric("vllm:num_requests_waiting") == 0


def check_that_it_ends_well(server):
    """The engine's last deed is to look whether every slot is free or the prefix cache's."""
    server.process.send_signal(signal.SIGTERM)
    assert server.finish() == 0
    assert not any(re.search("Traceback|has failed", line) for line in server.lines), server.lines


@needs_model
@pytest.mark.parametrize(
    "more",
    [
        pytest.param((), id="computed again"),
        pytest.param(("--host-kv-slots", "200"), id="moved to the host", marks=pytest.mark.slow),
    ],
)
def test_many_streams_over_a_small_pool(plans, folder, more):
    model = ("--model", str(folder), "--served-model-name", NAME)
    with serving(*model, *POOL, *more, "--no-warm-up") as server:
        count = asyncio.run(load(server, plans, random.Random(3), lambda: True))
        print(count)
        assert server.metric("vllm:num_preemptions_total") > 0
        check_that_nothing_is_left(server)
        check_that_it_ends_well(server)
    assert count.done + count.left == N_CLIENTS and min(count.done, count.left, count.stopped) > 5
    assert count.skipped < 0.05 * count.tokens


def resident_mib(pid):
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


@needs_model
@pytest.mark.slow
@pytest.mark.timeout(SOAK_S + 1200)
def test_memory_stays_as_it_is_for_ten_minutes(plans, folder):
    """JAXLAMINA_SOAK_S: other than 600 seconds."""
    samples = []

    async def both(server, seconds):
        end = time.monotonic() + seconds

        async def sample():
            while time.monotonic() < end:
                samples.append((time.monotonic(), resident_mib(server.process.pid)))
                await asyncio.sleep(1)

        return (await asyncio.gather(load(server, plans, rng, lambda: time.monotonic() > end), sample()))[0]

    rng = random.Random(5)
    model = ("--model", str(folder), "--served-model-name", NAME)
    with serving(*model, *POOL, "--host-kv-slots", "200") as server:
        asyncio.run(both(server, SOAK_S / 5))  # what is compiled or allocated at its first use
        check_that_nothing_is_left(server)
        samples.clear()
        count = asyncio.run(both(server, SOAK_S))
        check_that_nothing_is_left(server)
        n_preemptions = server.metric("vllm:num_preemptions_total")
        check_that_it_ends_well(server)
    seconds, mib = np.asarray(samples).T
    slope = 3600 * np.polyfit(seconds, mib, 1)[0]
    print(f"{count}; {n_preemptions:.0f} preemptions; {mib[0]:.0f} MiB at first, {mib[-1]:.0f} at last,")
    print(f"{mib.min():.0f} to {mib.max():.0f}, slope {slope:.1f} MiB an hour")
    assert slope < SOAK_SLOPE_LIMIT and n_preemptions > 0
    assert count.skipped < 0.05 * count.tokens
