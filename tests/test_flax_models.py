"""Models of the users' own through `LLM`: plain Flax of hands that know nothing of this project
(`tests/flax_models`), in one process."""

from __future__ import annotations

import pytest
from plain_models import NAMES, PROMPTS, flax_model, greedy_of_the_function

from jaxlamina import LLM, SamplingParams

GREEDY = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)


def tokens_of(llm: LLM) -> list[list[int]]:
    return [
        list(o.outputs[0].token_ids) for o in llm.generate([{"prompt_token_ids": p} for p in PROMPTS], GREEDY)
    ]


@pytest.mark.parametrize("name", [n for n in NAMES if n != "qk_norm_bf16"])
def test_greedy_tokens_are_the_functions_own(name: str):
    llm = LLM(flax_model(name), max_num_seqs=3, max_model_len=96)
    assert tokens_of(llm) == greedy_of_the_function(name)
