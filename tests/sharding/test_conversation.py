"""What a conversation on a mesh compiles: as much as on one device."""

from __future__ import annotations

from pathlib import Path

import pytest
from runtime.test_few_programs import PREFILL
from support.devices import printed

from kvjax.policies.names import POLICIES


def check(mesh: str, turns: int, *names: str) -> None:
    found = printed(Path(__file__).with_name("conversation.py"), mesh, str(turns), *names)
    assert len(found) == len(names)
    for early, late in found:
        assert sum(late.get(name, 0) for name in PREFILL) <= 4 and late["decode_chunk"] == 1, late
        assert late == early


def test_turns_share_a_few_programs_and_compile_none_after_the_eighth():
    check("data=2,model=2", 10, "lagkv")


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICIES)
def test_twenty_turns_of_every_policy(name):
    check("data=2,model=2", 20, name)
