"""Scores of SCBench's own code, for tests/eval/test_scbench_metrics.py.

Run it where ``rouge_score`` and ``nltk`` are installed, with a checkout of github.com/microsoft/MInference (fb56c91):

    python scripts/golden_scbench.py MInference/scbench tests/golden/scbench.json

Its other imports are not needed for scoring and are stood in for; so is ``evaluate``, whose rouge is ``rouge_score``.
"""

from __future__ import annotations

import json
import random
import sys
import types
from pathlib import Path
from typing import Any

WORDS = "alpha beta gamma delta the a key value Stone, river. RED red (A) B: C".split()
#: Answers that the benchmark's rules treat each in a way of their own.
OPTIONS = [
    "A", " B. Red", "C", "Red stone", "the answer is: B", "Answer: Blue", "answer:", "I think the option is C.",
    "It is D or A", "", "  ", "The word ABC is no option", "answer is Blue, surely", "\nBlue", "nothing of it", "AB",
]  # fmt: skip
NUMBERS = ["5", "It is 12.", "12.0", "no 3.7 or 4", "-5", "", "007", "1,234", "99 99", "3.", "12.9"]
CODE = [
    "def add(a, b):\n    # sum\n    return a + b\n",
    "def sub(a, b):\n    # difference\n    return a - b\n",
    "class Stack:\n    def push(self, item):\n        self.items.append(item)\n        return len(self.items)\n",
]


def stand_in(name: str, **members: Any) -> None:
    """A module of that name with these members."""
    module = types.ModuleType(name)
    for member, value in members.items():
        setattr(module, member, value)
    sys.modules[name] = module


def no_parser(language: str) -> Any:
    """Parsers are not there: the first block of code is what the benchmark falls back to."""
    return types.SimpleNamespace(parse=None, query=lambda text: None)


class Rouge:
    """``evaluate``'s rouge: rouge_score without a stemmer."""

    def compute(self, predictions: list[str], references: list[str], use_aggregator: bool) -> dict[str, list[float]]:
        from rouge_score.rouge_scorer import RougeScorer

        scorer = RougeScorer(["rougeLsum"], use_stemmer=False)
        pairs = zip(references, predictions, strict=True)
        return {"rougeLsum": [scorer.score(wanted, said)["rougeLsum"].fmeasure for wanted, said in pairs]}


def sentence(rng: random.Random, longest: int) -> str:
    return "".join(rng.choice(WORDS) + rng.choice([" ", " ", "\n", ", "]) for _ in range(rng.randint(0, longest)))


def main(folder: str, out: str) -> None:
    sys.path.insert(0, folder)
    stand_in("evaluate", load=lambda name: Rouge())
    stand_in("args", parse_args=None)
    stand_in("tempdir")
    stand_in("tree_sitter_languages", get_language=no_parser, get_parser=no_parser)
    for name in ("transformers", "tqdm", "rich", "rich.console", "rich.progress", "rich.table"):
        members = ["AutoConfig", "tqdm", "Console", "Table", "Progress"]
        members += ["BarColumn", "MofNCompleteColumn", "TextColumn", "TimeElapsedColumn"]
        stand_in(name, **dict.fromkeys(members))
    import compute_scores as official
    import repo_qa_utils as repoqa

    rng, cases = random.Random(7), []

    def case(metric: str, task: str, prediction: str, answers: list[str], label: Any) -> None:
        score = official.get_score_one(prediction, label, task, "x")
        cases.append({"metric": metric, "prediction": prediction, "answers": answers, "score": score})

    for said in OPTIONS:
        for answers in (["Red", "A"], ["Blue", "B"], ["C", "C"]):
            case("option named", "longbook_choice_eng", said, answers, answers)
    for said in NUMBERS:
        for number in (5, 12, 3, 7):
            case("first number", "math_find", said, [str(number)], number)
            case("first digits", "passkey", said, [str(number)], str(number))
    for _ in range(25):
        said, label = sentence(rng, 14), sentence(rng, 10)
        case("ROUGE-Lsum", "scbench_summary", said, [label], label)
        case("F1 of characters", "longbook_qa_chn", "红石。" + said, ["红色的石头 " + label], ["红色的石头 " + label])
        names = rng.sample(WORDS, 3)
        case("names found", "scbench_vt", said, names, names)
        case("label in answer, any case", "longdialogue_qa_eng", said, names[:1], names[:1])
        case("label in answer", "kv_retrieval", said, names[:1], names[0])
    needles = [{"name": str(number), "needle": code} for number, code in enumerate(CODE)]
    for said in [*CODE, *(f"Here:\n```python\n{code}```\nDone." for code in CODE), CODE[0].replace("+", "*"), "x", ""]:
        for number, code in enumerate(CODE):
            truth = {"func_name": str(number), "ground_truth": code}
            verdict, _, similar = repoqa.needle_evaluator(said, truth, needles, "python", False)
            score = float(verdict is repoqa.Result.BEST_MATCH and similar >= 0.8)
            cases.append(
                {"metric": "function found", "prediction": said, "answers": [code], "classes": CODE, "score": score}
            )
    similar = []
    for _ in range(30):
        said, wanted = sentence(rng, 12) + "x", sentence(rng, 9) + rng.choice("xy")
        similar.append([said, wanted, repoqa.compute_function_similarity(said, wanted)])
    Path(out).write_text(json.dumps({"scores": cases, "similar": similar}, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
