"""Decode steps over a link between hosts that is slow: `auto` finds by measurement that staggered batches pay."""

from __future__ import annotations

import os
import re
import signal

import pytest
from checkpoint_examples import tiny_words_folder
from launch_hosts import Hosts, why_no_hosts, why_no_rates
from slow_links import job
from supervised import Asked, Supervised, wait_until

pytestmark = [pytest.mark.mpi, pytest.mark.slow]


def chosen(server):
    return [line for line in server.lines if "decode steps of batch 64" in line and ": measured: " in line]


@pytest.mark.timeout(240)
def test_auto_staggers_batches_over_a_slow_link(tmp_path):
    """A step's messages fill the link: two staggered batches use both of its directions at once."""
    if (reason := why_no_hosts() or why_no_rates()) is not None:
        pytest.skip(reason)
    model = tiny_words_folder(tmp_path, max_position_embeddings=2048)
    with Hosts(tmp_path) as hosts:
        hosts.limit(2)
        variables = {"XLA_FLAGS": os.environ.get("XLA_FLAGS", "")}
        server = Supervised.of(job(hosts, n_batches="auto"), model, ("--max-num-seqs", "64"), variables)
        try:
            body = {"prompt": "w1 w2", "n": 64, "max_tokens": 40, "ignore_eos": True}
            Asked(server.port, "/v1/completions", body).join(120)
            wait_until(lambda: chosen(server))
            [line] = chosen(server)
            took = {int(n): float(ms) for ms, n in re.findall(r"([\d.]+) ms as (\d)", line)}
            assert "go as 2 staggered" in line
            assert took[2] < 0.9 * took[1], line
            server.process.send_signal(signal.SIGTERM)
            assert server.finish() == 0, "\n".join(server.lines)
        finally:
            server.close()
