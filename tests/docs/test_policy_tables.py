"""The tables of policies, in the README and the guide, name every policy, and in the guide every option and default."""

from __future__ import annotations

import re
import typing

import pytest
from support.howto import ROOT

from kvjax.policies import parse, registry
from kvjax.policies.parsing import options_of

NAMES = sorted(registry().keys() - {"best"})  # which is any of the others
#: Options that the guide describes for all policies together.
COMMON = {"budget", "ratio", "keep_turn"}


def rows(page: str) -> dict[str, str]:
    """The last cell of each row of the page's first table of policies, by the policy's name."""
    text = (ROOT / page).read_text(encoding="utf-8")
    table = re.search(r"^\| policy \| keeps \|.*\n\|[-| ]+\|\n((?:\|.*\n)+)", text, re.MULTILINE)
    assert table is not None
    found = [line.strip("| ").split(" | ") for line in table[1].splitlines()]
    return {cells[0].strip("`"): cells[2] if len(cells) > 2 else "" for cells in found}


@pytest.mark.parametrize("page", ["README.md", "docs/guides/policies.md"])
def test_every_policy_is_in_the_table(page):
    assert sorted(rows(page)) == NAMES


def choices(cls: type) -> set[str]:
    """The words that options of a policy take."""
    hints = typing.get_type_hints(cls)
    kinds = [kind for field in options_of(cls) for kind in (hints[field.name], *typing.get_args(hints[field.name]))]
    return {word for kind in kinds if typing.get_origin(kind) is typing.Literal for word in typing.get_args(kind)}


@pytest.mark.parametrize("name", NAMES)
def test_the_guide_says_every_option_and_its_default(name):
    cls = registry()[name]
    defaults = {field.name: field.default for field in options_of(cls)}
    told = set()
    for word in re.findall(r"`([^`]+)`", rows("docs/guides/policies.md")[name]):
        option, _, value = word.partition("=")
        if value and defaults.get(option) is not None:  # None stands for a default that depends on others
            assert parse(f"{name}:{word}") == parse(name), f"{word} is not the default"
        others = word in NAMES and word not in choices(cls)  # such as "and those of `snapkv`"
        told |= {field.name for field in options_of(registry()[word])} if others else {option}
    assert defaults.keys() - COMMON <= told, "the guide leaves an option out"
    assert told <= defaults.keys() | choices(cls), "the guide names an option that there is not"
