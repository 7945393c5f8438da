"""A conversation of two rows on a tiny model, all of ids, so that lengths are known.

The first prompt of a few hundred tokens puts every later turn in the same buckets, and so in the same programs.
"""

from __future__ import annotations

import numpy as np

import kvjax

RNG = np.random.default_rng(4)
LAYERS, BELOW = 4, 2
#: Two rows; turn by turn. The first turn is long, the others fit its bucket.
SIZES = ((300, 290), (20, 31), (33, 12), (15, 40))
TURNS = [[RNG.integers(0, 256, size).tolist() for size in sizes] for sizes in SIZES]
NEW = 6


def talk(lm, turns, policy, cache=None, **options):
    """Outputs of every turn, a list a turn."""
    said = []
    for prompts in turns:
        options = {"max_new_tokens": NEW, "logprobs": True, **options}
        outputs = kvjax.generate(lm, prompts, policy=policy if cache is None else None, cache=cache, **options)
        cache = [output.cache for output in outputs]
        said.append(outputs)
    return said


def ids_of(outputs, row: int) -> list[int]:
    """Every token a row was fed, turn by turn joined, the last answer's last token left out."""
    fed = [token for turn, said in zip(TURNS, outputs, strict=False) for token in (*turn[row], *said[row].tokens)]
    return fed[:-1]
