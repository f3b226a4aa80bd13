"""Prompts of an exact token count: real text where there is a tokenizer, random ids otherwise. Knows no
model.

Real text matters: random ids leave next-token choices so close that two correct float32 implementations part
ways, and nothing could be said of whether the peers computed the same thing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxlamina.errors import UserError

PASSAGE = """\
A lighthouse keeper on a rocky island wrote down the weather four times a day for thirty-one years. The notes are
short: wind, cloud, the height of the waves, the ships that passed. Read one after another they show more than
weather. In the first winters the supply boat came twice a month, and the keeper counted candles and sacks of flour;
later a cable brought electricity, and the entries speak of a lamp that turns by itself and of evenings without work.
Storms are described with care. On a morning in March the sea broke the lower door, filled the store room to the
shelf and carried away the bench on which visitors used to sit. The keeper's daughter learned to read from almanacs
and to measure angles with a brass instrument that her grandfather had brought home from a voyage around the cape.
She drew maps of the reefs, first from memory and then by rowing out at low tide with a weighted line. Fishermen from
the mainland laughed at the drawings until one of them, caught by fog, found the narrow channel exactly where the map
said it would be. After that they paid for copies with salted fish, and she numbered every copy and wrote the date in
the corner. When engineers arrived to plan a harbour, they brought better instruments and a steam launch. Their survey
took two summers. It differed from hers in eleven places; in nine of those, as divers found out afterwards, hers was
right. The engineers printed both maps side by side, with her name under the second, and sent a copy to the island
with the next boat. It hangs there still, behind glass, between the barometer and the list of keepers.
"""


def encoder_of(checkpoint: Any) -> Callable[[str], Sequence[int]] | None:
    """A model's tokenizer as a function, without special tokens; None if it has none."""
    try:
        tokenizer = checkpoint.tokenizer()
    except UserError:
        return None
    if tokenizer is None:
        return None
    return lambda text: tokenizer.encode(text, add_special_tokens=False)


def prompts(
    n_prompts: int,
    n_tokens: int,
    *,
    vocab_size: int,
    encode: Callable[[str], Sequence[int]] | None,
    seed: int = 0,
) -> list[list[int]]:
    """`n_prompts` different prompts of exactly `n_tokens` ids each.

    encode: text to ids; the passage is read from another sentence in each prompt and repeated as needed.
    None: ids drawn evenly from the vocabulary with `seed`.
    """
    if encode is None:
        drawn = np.random.default_rng(seed).integers(0, vocab_size, (n_prompts, n_tokens))
        return [[int(token) for token in row] for row in drawn]
    words = PASSAGE.split()
    made = []
    for i in range(n_prompts):
        at = (i * 7) % len(words)
        turned = " ".join([*words[at:], *words[:at]])
        ids: list[int] = []
        while len(ids) < n_tokens:
            ids.extend(encode(turned if not ids else " " + turned))
        made.append(ids[:n_tokens])
    return made
