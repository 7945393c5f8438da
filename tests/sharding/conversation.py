"""What a conversation on a mesh compiles: programs by the eighth turn of ``turns``, and after it; a line a policy."""

from __future__ import annotations

import json
import random
import sys

import toys
from runtime.test_few_programs import OPTIONS
from support.compiled import compiled_programs
from support.scorers import with_profiles

import kvjax
from kvjax.policies import parse


def counted(lm: kvjax.LanguageModel, name: str, turns: int) -> tuple[dict[str, int], dict[str, int]]:
    """How often each program was compiled by the eighth turn, and by the last."""
    draw, early = random.Random(7), {}
    with compiled_programs() as programs:
        policy = with_profiles(parse(name + OPTIONS.get(name, "")), lm.config)
        chat = kvjax.Chat(lm, policy=policy, max_new_tokens=8)
        for turn in range(turns):
            chat.send("".join(draw.choice("etaoin shrdlu") for _ in range(draw.randint(10, 200))))
            early = dict(programs) if turn == 7 else early
    return early, dict(programs)


def main() -> None:
    """Of a mesh, a number of turns, and names of policies."""
    mesh, turns, *names = sys.argv[1:]
    lm = toys.tiny_model(max_position=8192, num_layers=2, hidden_size=16, intermediate_size=16).on(mesh)
    for name in names:
        print(json.dumps(counted(lm, name, int(turns))), flush=True)


if __name__ == "__main__":
    main()
