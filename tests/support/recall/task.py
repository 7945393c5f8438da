"""Associative recall as token ids: pairs hidden in noise, asked for by their key; and segments repeated over and over.

A pair is a key token followed by two value tokens. A haystack is random noise with pairs in it; asked with a key, the
model answers with the key's two values. Nothing near the question helps: what the noise is says nothing, and the pairs
are further away than any window of the tests. Segments of random tokens, repeated, are what RazorAttention looks at to
find retrieval heads, and what makes such heads form quickly in training (induction heads, Olsson et al. 2022).
"""

from __future__ import annotations

import numpy as np

BOS = 0
KEYS, VALUES, NOISE = range(1, 65), range(65, 129), range(129, 256)
VOCAB = 256
# A key and its two values.
PAIR = 3


def repeats(random: np.random.RandomState, batch: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of one random segment each, all tokens different, again and again, after the beginning-of-text token.

    Returns:
      ``(tokens [batch, length] int32, asked [batch, length] bool)``; asked are the tokens that can be known, from the
      second one of the first repetition on.
    """
    tokens = np.full((batch, length), BOS, np.int32)
    asked = np.zeros((batch, length), bool)
    for row in range(batch):
        size = random.randint(8, min(length // 2, VOCAB - 1))
        tokens[row, 1:] = np.resize(random.permutation(np.arange(1, VOCAB))[:size], length - 1)
        asked[row, size + 2 :] = True
    return tokens, asked


def haystack(random: np.random.RandomState, length: int, pairs: int, tail: int) -> tuple[np.ndarray, np.ndarray]:
    """Noise with pairs in it, none in the last ``tail`` tokens, after the beginning-of-text token.

    Returns:
      ``(tokens [length] int32, pairs [pairs, 3] int32)``: keys and values of a haystack all differ.
    """
    keys = random.permutation(np.array(KEYS))[:pairs]
    values = random.permutation(np.array(VALUES))[: 2 * pairs].reshape(pairs, 2)
    hidden = np.column_stack([keys, values]).astype(np.int32)
    tokens = random.choice(np.array(NOISE), length).astype(np.int32)
    tokens[0] = BOS
    # Any number of noise tokens lies between two pairs.
    gaps = np.sort(random.randint(0, length - tail - PAIR * pairs, pairs))
    for pair, start in zip(hidden, 1 + gaps + PAIR * np.arange(pairs), strict=True):
        tokens[start : start + PAIR] = pair
    return tokens, hidden


def questions(random: np.random.RandomState, batch: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of a haystack each, followed by every key with its values in random order.

    Returns:
      ``(tokens [batch, length] int32, asked [batch, length] bool)``; asked are the values at the end.
    """
    tokens = np.zeros((batch, length), np.int32)
    asked = np.zeros((batch, length), bool)
    for row in range(batch):
        pairs = random.randint(2, max(3, min(16, length // 12) + 1))
        rest = length - PAIR * pairs
        tokens[row, :rest], hidden = haystack(random, rest, pairs, tail=0)
        tokens[row, rest:] = random.permutation(hidden).reshape(-1)
        asked[row, rest:] = np.tile([False, True, True], pairs)
    return tokens, asked
