"""Ask kvjax the needle questions that ``kvpress_answers.py`` asks NVIDIA's kvpress, and print both in one table.

From the repository; the second command needs what its module says:

    python scripts/peer_answers.py ANSWERS --data benchmarks       # goes on where it was stopped
    python scripts/kvpress_answers.py ANSWERS --data benchmarks    # likewise
    python scripts/peer_answers.py ANSWERS --data benchmarks --rows

``ANSWERS`` is a file that gets a line for every answer. The prompts are those of ``kvjax eval --suite ruler --tasks
niah_single_1,niah_single_2 --length 1350 --limit 10``. kvpress compresses a context and leaves all that comes after it
whole, which is ``kvjax.read(..., once=True)``; policies that go on choosing while they answer cannot be read so, and
choose again with the question.
"""

from __future__ import annotations

import argparse
import json
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import kvjax
from kvjax.eval.ruler import match_all
from kvjax.eval.suites.data import DataFolder
from kvjax.eval.suites.item import Asked
from kvjax.eval.suites.prompts import Prepared, prepare
from kvjax.eval.suites.ruler_suite import RULER
from kvjax.policies import parse
from kvjax.policies.fixed import fixed
from kvjax.policies.inner import with_size

TASKS = ("niah_single_1", "niah_single_2")
RETAINED = 0.25
#: Policies that kvpress has too, with their default options but for the size.
METHODS = (
    "streamingllm",
    "snapkv",
    "pyramidkv",
    "tova",
    "h2o",
    "finch",
    "keydiff",
    "lagkv",
    "qfilters",
    "expected_attention",
    "adaptive",
    "chunkkv",
    "compactor",
    "criticalkv",
    "merged",
    "adaptive:inner=kvzip",
    "adaptive:inner=kvzip,scope=model",
)


def arguments(about: str | None) -> argparse.ArgumentParser:
    """The arguments of both sides."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("answers", type=pathlib.Path)
    parser.add_argument("--data", type=pathlib.Path, required=True, help="the folder of kvjax eval")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--limit", type=int, default=10, help="prompts of each task")
    parser.add_argument("--length", type=int, default=1350)
    parser.add_argument("--methods", default=";".join(METHODS), help="some of them, with semicolons between them")
    return parser


def prompts(lm: Any, options: argparse.Namespace) -> list[Prepared]:
    """The prompts, one of each task in turn: a run that is stopped has answers to both."""
    asked = Asked(tasks=TASKS, length=options.length, limit=options.limit)
    items = RULER.items(lm, DataFolder(options.data), asked)
    return [prepare(lm, item) for item in sorted(items, key=lambda item: int(item.id.rpartition("/")[2]))]


class Journal:
    """The answers of one side, kept in the file that both share."""

    def __init__(self, path: pathlib.Path, side: str):
        self.path, self.side = path, side
        lines = path.read_text().splitlines() if path.exists() else []
        mine = [line for line in map(json.loads, lines) if line["side"] == side]
        self.scores: dict[tuple[str, str], float] = {(line["method"], line["item"]): line["score"] for line in mine}

    def missing(self, method: str, asked: Sequence[Prepared]) -> bool:
        return any((method, one.item.id) not in self.scores for one in asked)

    def add(self, method: str, one: Prepared, text: str) -> None:
        score = match_all(text, one.item.answers)
        self.scores[method, one.item.id] = score
        line = {"side": self.side, "method": method, "item": one.item.id, "score": score, "text": text}
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(self.side, method, one.item.id, score, repr(text[:40]), flush=True)


def ask(lm: Any, asked: Sequence[Prepared], journal: Journal, methods: Sequence[str]) -> None:
    """Answer what the journal lacks."""
    for method in methods:
        policy = with_size(parse(method), ratio=RETAINED)
        for one in asked:
            if journal.missing(method, [one]):
                cache = kvjax.read(lm, list(one.context), policy=policy, once=chooses_once(policy))
                options = {"max_new_tokens": one.item.max_new_tokens, "chat": False}
                journal.add(method, one, kvjax.generate(lm, list(one.question), cache=cache, **options).text)


def chooses_once(policy: Any) -> bool:
    """Whether a context may be read once under a policy."""
    try:
        return fixed(policy) is not policy
    except kvjax.KvjaxError:
        return False


def rows(asked: Sequence[Prepared], sides: Sequence[Journal], methods: Sequence[str]) -> Iterator[str]:
    """A row for each method: right answers of both sides to each task, and those that one side alone has."""
    for method in methods:
        cells, alone = [f"`{method}`"], [0, 0]
        for task in TASKS:
            keys = [(method, one.item.id) for one in asked if one.item.task == task]
            pairs = [[side.scores[key] for side in sides] for key in keys if all(key in side.scores for side in sides)]
            cells += [f"{sum(score):g} of {len(pairs)}" for score in zip(*pairs, strict=True)] or ["", ""]
            alone = [alone[0] + sum(a > b for a, b in pairs), alone[1] + sum(b > a for a, b in pairs)]
        yield "| " + " | ".join([*cells, *map(str, alone)]) + " |"


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rows", action="store_true", help="print the table's rows")
    options = parser.parse_args()
    lm, methods = kvjax.load(options.model, dtype="float32"), options.methods.split(";")
    asked, ours = prompts(lm, options), Journal(options.answers, "kvjax")
    if options.rows:
        print("\n".join(rows(asked, [ours, Journal(options.answers, "kvpress")], methods)))
    else:
        ask(lm, asked, ours, methods)


if __name__ == "__main__":
    main()
