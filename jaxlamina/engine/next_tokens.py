"""From a batch's logits to what is drawn or scored of them, launched behind the model's step and not looked
at.

Knows requests as rows, what their jobs ask for, and the sampler; nothing of slots, scheduling or how logits
are made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxlamina.engine.in_flight import LaunchedRows, NewestTokens, Scored
from jaxlamina.engine.live_request import LiveRequest
from jaxlamina.engine.request import Request
from jaxlamina.errors import contained
from jaxlamina.process.compile_ahead import ProgramAhead, only_compiled
from jaxlamina.sampling.adjustments import LEAST_COUNTED, LEAST_TOKENS, Adjusted, Counted, power_of_4
from jaxlamina.sampling.params import MAX_LOGIT_BIASES, SamplingParams
from jaxlamina.sampling.sampler import LOGPROBS_WIDTHS, Row, Sampler, SamplingBatch
from jaxlamina.sampling.structured import n_mask_words
from jaxlamina.steps.buckets import CompiledSizes

# One of each of the sampler's ways to choose: the likeliest token, a drawn one, and one drawn of those that a
# filter leaves.
_WAYS_TO_CHOOSE = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=1.0, top_p=0.9),
)
_LIKELIEST = SamplingBatch.build([Row(_WAYS_TO_CHOOSE[0], 0, 0)], 1)  # for any number of rows


class Drawing:
    """``begin`` once a step; then for each of its batches ``draw``, after ``score`` where a prompt is to be
    scored."""

    def __init__(self, max_rows: int, sizes: CompiledSizes, vocab_size: int, n_end_tokens: int) -> None:
        """``max_rows``: sequences of a step. ``n_end_tokens``: that end a sequence of the model's own
        accord."""
        self.sampler = Sampler()
        self._sizes = sizes
        self.vocab_size = vocab_size
        self._most_candidates = max_rows * max(2, 1 + n_end_tokens)  # as `BeamSearch.n_candidates`
        self._newest = NewestTokens(max_rows, sizes.buckets.batch[-1])
        self._rows_of = ProgramAhead(_rows_of)

    def begin(self) -> None:
        self._newest.begin()

    def newest(self, requests: Sequence[Request], known: np.ndarray) -> np.ndarray | jax.Array:
        """``known`` [B, 1] int32, but tokens in flight: on the device where there are any."""
        return self._newest.take(requests, known)

    def repeated(self, logits: jax.Array, n: int) -> jax.Array:
        """``logits`` [1, V] for ``n`` sequences that begin alike, padded."""
        return self._rows_of(logits, np.zeros(self._sizes.rows(n), np.int32))

    def score(self, request: Request, span: tuple[int, int], logits: jax.Array) -> tuple[jax.Array, Scored]:
        """(Logits [1, V] after the last token of a prompt's ``span``; how likely the prompt's tokens are that
        follow those of the span.) ``logits`` [1, T, V]: after each."""
        job: LiveRequest = request.payload
        assert job.params.prompt_logprobs is not None
        start, stop = span
        following = np.zeros(logits.shape[1], np.int32)
        known = request.prompt_token_ids[start + 1 : stop + 1]
        following[: len(known)] = known
        reported = self.sampler.report(logits, following, job.params.prompt_logprobs)
        last = self._rows_of(logits, np.asarray([stop - start - 1], np.int32))
        return last, Scored(start + 1, len(known), reported)

    def draw(
        self,
        requests: Sequence[Request],
        logits: jax.Array,
        newest: Any = None,
        scored: Scored | None = None,
    ) -> LaunchedRows:
        """A token for each row that is drawn; of beams' rows their candidates. ``newest`` [B, 1] int32: the
        tokens that a decode step took in, maybe on the device."""
        beams: list[LiveRequest] = [request.payload for request in requests if request.lockstep]
        candidates = sampled = None
        if beams:
            most = max(max(job.beams.n_candidates, job.params.logprobs or 0) for job in beams if job.beams)
            candidates = self.sampler.likeliest(logits, most)
        if len(beams) < len(requests):
            sampled = self.sampler(logits, _batch_of(requests, logits.shape[0], newest))
            self._newest.keep(requests, sampled)
            for request in requests:
                request.n_in_flight += not request.lockstep
        # Beams branch; a grammar's next mask comes of the token before it.
        shapes_next = any(r.lockstep or r.payload.params.structured_outputs for r in requests)
        return LaunchedRows(
            requests, newest is not None, sampled, candidates, scored=scored, shapes_next=shapes_next
        )

    def compile(self, device: jax.Device, n: int, max_tokens: int, *, usual: bool) -> None:
        """Compiles the ``usual`` programs that ``n`` rows of logits on ``device`` may meet, one of which
        every request needs, or all others, for requests of at most ``max_tokens`` tokens; but those of
        prompts' log-probabilities (`compile_scores`), of very many bans a row, and of beams that many tokens
        may end. Several threads may do so for rows of different numbers, while tokens are drawn, too."""
        with only_compiled(device) as like:
            self._compile(like((n, self.vocab_size), np.float32), like, max_tokens, usual)

    def _compile(self, logits: Any, like: Callable[..., Any], max_tokens: int, usual: bool) -> None:
        n = logits.shape[0]
        tokens = like((n,), np.int32)
        if usual:
            for params in _WAYS_TO_CHOOSE:
                self.sampler(logits, SamplingBatch.build([Row(params, 0, 0)], n))
            self._newest.warm_up(tokens)
            return
        for n_top in LOGPROBS_WIDTHS:
            self.sampler.report(logits, tokens, n_top)
        for asked in self._kinds_of_adjustment(n, max_tokens):
            for newest in (None, like((n, 1), np.int32)):
                batch = SamplingBatch.build([Row(_WAYS_TO_CHOOSE[0], 0, 0, asked)], n, newest)
                self.sampler(logits, batch)
        for size in _sizes(4, self._most_candidates):
            self.sampler.likeliest(logits, size)
        if n == 1:
            for size in self._sizes.buckets.batch:
                self._rows_of(logits, np.zeros(size, np.int32))

    def rehearse(self, device: jax.Device, n: int) -> None:
        """Runs what every request needs one of with ``n`` rows of logits, of zeros: `compile` leaves it to
        the first run to load a program."""
        logits = jax.device_put(np.zeros((n, self.vocab_size), np.float32), device)
        for params in _WAYS_TO_CHOOSE:
            drawn = self.sampler(logits, SamplingBatch.build([Row(params, 0, 0)], n))
        self._newest.warm_up(jax.device_put(np.zeros(n, np.int32), device))
        jax.block_until_ready(drawn)

    def compile_scores(self, device: jax.Device, n: int) -> None:
        """Compiles every program that logits [1, n, V] of a scored prompt may meet."""
        with only_compiled(device) as like:
            logits: Any = like((1, n, self.vocab_size), np.float32)
            for n_top in LOGPROBS_WIDTHS:
                self.sampler.report(logits, np.zeros(n, np.int32), n_top)
            self._rows_of(logits, np.zeros(1, np.int32))

    def _kinds_of_adjustment(self, n_rows: int, max_tokens: int) -> list[Adjusted]:
        found = [
            Adjusted(mask=np.full(n_mask_words(self.vocab_size), 0xFFFFFFFF, np.uint32)),
            Adjusted(banned=[0]),
            Adjusted(banned_after=[(0, 0)]),
        ]
        for n in _sizes(LEAST_TOKENS, min(MAX_LOGIT_BIASES, self.vocab_size)):
            found.append(Adjusted(logit_bias=dict.fromkeys(range(n), 0.0)))
        for n in _sizes(LEAST_COUNTED, n_rows * min(max_tokens, self.vocab_size)):
            found.append(Adjusted(presence_penalty=1.0, counted=Counted(range(n))))
        return found


def _rows_of(logits: jax.Array, rows: jax.Array) -> jax.Array:
    return logits.reshape(-1, logits.shape[-1])[rows]


def _batch_of(requests: Sequence[Request], size: int, newest: Any) -> SamplingBatch:
    if all(request.payload.is_plain for request in requests):  # often, and said for each token
        return _LIKELIEST
    return SamplingBatch.build([_row_of(request, newest) for request in requests], size, newest)


def _row_of(request: Request, newest: Any) -> Row:
    """How a request's next token is drawn. One that cannot say gets any token, and is ended with it
    (``Job.error``)."""
    job: LiveRequest = request.payload
    if job.error is None:
        try:
            return job.row(
                request.index,
                position=request.n_tokens,
                known=request.output_token_ids,
                n_in_flight=request.n_in_flight,
                newest_follows=newest is not None,
            )
        except BaseException as error:  # noqa: BLE001 (whatever it is, the others go on)
            job.error = contained(error)
    return Row(_WAYS_TO_CHOOSE[0], 0, 0)


def _sizes(least: int, most: int) -> list[int]:
    """All that `power_of_4` gives up to that of ``most``, as numbers that it is given for."""
    sizes = [least]
    while sizes[-1] < power_of_4(most, least):
        sizes.append(4 * sizes[-1])
    return [min(size, most) for size in sizes]
