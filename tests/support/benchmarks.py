"""A folder of benchmark text, small and made up, in the layout that ``kvjax eval --data`` reads."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

WORDS = "river stone cloud paper garden winter signal window bridge market silver letter forest engine mirror".split()


def sentence(rng: random.Random, least: int = 5) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(least, 12))).capitalize() + rng.choice([".", ".", "?", "!"])


def essays(count: int = 1500) -> str:
    """Sentences with the abbreviations, quotations and line ends that a cutter of sentences meets."""
    rng = random.Random(1)
    extra = ['He said "wait." Then Mr. Stone left.', "It is e.g. small, i.e. 3.5 m.\n\n", "J. K. Stone wrote it."]
    return " ".join(rng.choice(extra) if rng.random() < 0.05 else sentence(rng) for _ in range(count))


def squad() -> dict[str, Any]:
    rng = random.Random(2)
    articles = []
    for article in range(4):
        paragraphs = []
        for number in range(30):
            name = f"Name{article}x{number}"
            text = f"{' '.join(sentence(rng) for _ in range(4))} The keeper is {name}. {sentence(rng)}"
            asked = [
                {"question": f"Who keeps {article}-{number}?", "answers": [{"text": name}], "is_impossible": False}
            ]
            asked.append({"question": "Why?", "answers": [], "is_impossible": True})
            paragraphs.append({"context": text, "qas": asked})
        articles.append({"title": str(article), "paragraphs": paragraphs})
    return {"version": "v2.0", "data": articles}


def hotpot() -> list[dict[str, Any]]:
    rng = random.Random(3)
    rows = []
    for number in range(40):
        given = [[f"Title {number} {i}", [sentence(rng), f" {sentence(rng)}"]] for i in range(10)]
        rows.append({"question": f"Which title is {number}?", "answer": f"Title {number}", "context": given})
    return rows


LONGBENCH = {
    "hotpotqa": [
        {"input": "Who keeps the key?", "context": "Passage 1:\nAnna keeps the key. {It} is old.", "answers": ["Anna"]},
        {"input": "Where is it?", "context": "Passage 1:\n" + "It is far. " * 400, "answers": ["far", "away"]},
    ],
    "trec": [
        {
            "input": "Question: Who was he ?\nType:",
            "context": "Question: What is gold ?\nType: Entity\n",
            "answers": ["Human being"],
            "all_classes": ["Human", "Human being", "Entity"],
        }
    ],
}


def chats() -> list[dict[str, Any]]:
    def turns(*texts: str) -> list[dict[str, Any]]:
        return [{"role": "user", "content": text, "has_answer": True} for text in texts]

    common = {"question_date": "2023/05/30", "haystack_session_ids": ["b", "a"]}
    sessions = {
        "haystack_dates": ["2023/05/21", "2023/05/20"],
        "haystack_sessions": [turns("I ran 5 km."), turns("Hi")],
    }
    return [
        {
            "question_id": "q1",
            "question_type": "multi-session",
            "question": "How far?",
            "answer": 5,
            **common,
            **sessions,
        },
        {
            "question_id": "q2_abs",
            "question_type": "multi-session",
            "question": "Why?",
            "answer": "x",
            **common,
            **sessions,
        },
        {
            "question_id": "q3",
            "question_type": "single-session-preference",
            "question": "What?",
            "answer": "rubric",
            **common,
            **sessions,
        },
        {
            "question_id": "q4",
            "question_type": "single-session-user",
            "question": "What did I do?",
            "answer": "Ran",
            **common,
            **sessions,
        },
    ]


def topics() -> list[dict[str, Any]]:
    def rounds(name: str, count: int) -> str:
        said = f"USER: I would like to discuss the topic of {name}. \n " + " ASSISTANT: Yes. \n USER: Why? \n" * count
        return f"Now the record start. {said} Now the record ends. What is the first topic we discussed?"

    names = ["The tides of the sea", "Bees"]
    return [{"prompt": rounds(names[0], 3), "topics": names}, {"prompt": rounds("long", 2000), "topics": names}]


def choices() -> list[dict[str, Any]]:
    row = {f"choice_{letter}": f"option {letter}" for letter in "ABCD"}
    more = {"_id": "1", "sub_domain": "x", "domain": "Law", "difficulty": "easy", "length": "short"}
    return [{**row, **more, "question": "Which?", "answer": "B", "context": "It is B. " * 50}]


def write_benchmarks(folder: Path) -> Path:
    """Write the folder and return it."""
    texts = {
        "paulgraham/PaulGrahamEssays.json": json.dumps({"text": essays()}),
        "ruler/squad_dev_v2.0.json": json.dumps(squad()),
        "ruler/hotpotqa.json": json.dumps(hotpot()),
        "longbench_v2/data.json": json.dumps(choices()),
        "longmemeval/longmemeval_oracle.json": json.dumps(chats()),
    }
    lines = {f"longbench/{name}": rows for name, rows in LONGBENCH.items()} | {"longchat/topics_5": topics()}
    for name, rows in lines.items():
        texts[f"{name}.jsonl"] = "".join(json.dumps(row) + "\n" for row in rows)
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder
