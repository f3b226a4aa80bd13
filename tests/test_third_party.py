"""Models that other people have published, unmodified: their attention is found, they are cut and served.

`make test-third-party` installs them in an environment of their own. Elsewhere these tests are skipped.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax_models import published
from flax_models.published import MAX_LEN, VOCAB_SIZE, Built, Published

from jaxlamina import LLM, FlaxModel, SamplingParams
from splitter import SplitError

# Other people's packages warn of what they do.
pytestmark = [pytest.mark.third_party, pytest.mark.filterwarnings("ignore")]

NEW_TOKENS = 16
PROMPTS = ([3, 17, 58], [5, 90, 11, 2, 44, 44, 71, 8, 63, 29, 1])


def name_of(model: Published) -> str:
    return model.build.__name__.removeprefix("build_")


def built(model: Published) -> Built:
    if (why := model.missing()) is not None:
        pytest.skip(why)
    return model.build()


def greedy(model: Built) -> list[list[int]]:
    """What the function itself writes after `PROMPTS`, all tokens computed anew for each."""
    lengths = np.array([len(prompt) for prompt in PROMPTS])
    tokens = np.zeros((len(PROMPTS), lengths.max() + NEW_TOKENS), np.int32)
    for row, prompt in zip(tokens, PROMPTS, strict=True):
        row[: len(prompt)] = prompt
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    fn, rows = jax.jit(model.fn), np.arange(len(PROMPTS))
    for i in range(NEW_TOKENS):
        at = lengths + i
        tokens[rows, at] = np.asarray(fn(model.params, tokens, positions))[rows, at - 1].argmax(-1)
    return [row[n : n + NEW_TOKENS].tolist() for row, n in zip(tokens, lengths, strict=True)]


@pytest.mark.parametrize("model", published.ALL, ids=name_of)
def test_a_published_model_is_found_and_served(model: Published):
    own = built(model)
    flax_model = FlaxModel(own.fn, own.params, vocab_size=VOCAB_SIZE, max_model_len=MAX_LEN)
    assert len(flax_model.found.sites) == own.n_layers
    assert flax_model.check() <= 1e-5
    llm = LLM(flax_model, max_num_seqs=2, kv_slots=128)
    sampling = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    outputs = llm.generate([list(prompt) for prompt in PROMPTS], sampling)
    assert [list(out.token_ids) for out in outputs] == greedy(own)


@pytest.mark.parametrize("model", published.REFUSED, ids=name_of)
def test_a_published_model_that_cannot_be_cut_is_refused_with_its_line(model: Published):
    own = built(model)

    with pytest.raises(SplitError, match=rf"{model.package}/.*\.py:\d+"):
        _ = FlaxModel(own.fn, own.params, vocab_size=VOCAB_SIZE, max_model_len=MAX_LEN).found
