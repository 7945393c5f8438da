"""An engine for all tests of a module that need any."""

from __future__ import annotations

import pytest
from support.engines import LM

from kvjax.engine.engine import Engine


@pytest.fixture(scope="module")
def lagkv():
    """One engine for all tests that need any: it must be idle when they begin and end."""
    with Engine(LM, "lagkv:ratio=0.5,lag=16,sink=4", slots=3, prompt_tokens=320, new_tokens=80) as engine:
        yield engine
        assert engine.drain(60)
