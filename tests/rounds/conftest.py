"""The tiny model of conversations of rounds, and conversations held with it."""

from __future__ import annotations

import pytest
import toys
from support.round_talks import BELOW, LAYERS, TURNS, talk

from kvjax.policies import RoundAttention


@pytest.fixture(scope="module")
def lm():
    return toys.tiny_model(num_layers=LAYERS, max_position=1024)


@pytest.fixture(scope="module")
def full(lm):
    return talk(lm, TURNS, None)


@pytest.fixture(scope="module")
def everything(lm):
    return talk(lm, TURNS, RoundAttention(watershed=BELOW, top=1.0))


@pytest.fixture(scope="module")
def one_of_ten(lm):
    return talk(lm, TURNS, RoundAttention(watershed=BELOW))
