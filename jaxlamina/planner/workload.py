"""What the planner knows of the requests that a job serves: how long live requests are, how long their
answers and prompts.

Pure. A live request is one that decodes. A request with o tokens of output is live for o steps, and has its
prompt and what it has written so far as context. So long answers count more than short ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from jaxlamina.errors import UserError
from jaxlamina.planner.traces import Trace

_N_PROMPTS = 64  # so many quantiles stand for all prompts


@dataclass(frozen=True)
class Workload:
    """``context``: mean stored tokens of a live request, ``context_sd``: their standard deviation among live
    requests. ``n_output``: mean tokens of an answer. ``prompts``: prompt lengths, equally likely."""

    name: str
    context: float
    context_sd: float
    n_output: float
    prompts: tuple[float, ...]

    @classmethod
    def of_trace(cls, name: str, trace: Trace) -> Workload:
        prompt, output = trace.n_prompt.astype(float), trace.n_output.astype(float)
        n_steps = output.sum()
        # Over a request's steps: contexts prompt, prompt + 1, … prompt + output - 1.
        mean = prompt + (output - 1) / 2
        square = mean**2 + (output**2 - 1) / 12
        context = float((output * mean).sum() / n_steps)
        variance = float((output * square).sum() / n_steps) - context**2
        places = (np.arange(_N_PROMPTS) + 0.5) / _N_PROMPTS
        prompts = tuple(float(n) for n in np.quantile(prompt, places))
        return cls(name, context, math.sqrt(max(0.0, variance)), float(output.mean()), prompts)

    @classmethod
    def of_lengths(cls, name: str, n_prompt: float, n_output: float) -> Workload:
        """All requests alike: what is known where a trace's means are all there is."""
        context = n_prompt + (n_output - 1) / 2
        return cls(name, context, math.sqrt(max(0.0, (n_output**2 - 1) / 12)), n_output, (n_prompt,))

    def at_context(self, context: float) -> Workload:
        """The same with another mean context: all lengths of prompts, answers and contexts in proportion."""
        if not 1 <= context <= 1e9:
            raise UserError(f"a mean context of {context:g} tokens must be within 1 … 1,000,000,000")
        scale = context / self.context
        prompts = tuple(scale * n for n in self.prompts)
        return replace(
            self,
            context=context,
            context_sd=scale * self.context_sd,
            n_output=max(1.0, scale * self.n_output),
            prompts=prompts,
        )

    def stored_tokens(self, n_requests: int, sigmas: float = 0.0) -> float:
        """Stored tokens of so many live requests: their mean, or so many standard deviations more; the sum of
        independent requests is taken as normal."""
        return n_requests * self.context + sigmas * math.sqrt(n_requests) * self.context_sd
