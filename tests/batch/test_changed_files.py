"""A job's files that were damaged or changed by hand: what is not the job's is answered again, or refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.batch_rows import contents, prompts, records

from kvjax.errors import KvjaxError, UsageError

pytestmark = pytest.mark.usefixtures("quick")
ROWS = [{"prompt": text, "id": f"q{i}"} for i, text in enumerate(prompts(6))]
OPTIONS: dict[str, Any] = {"shard_rows": 3, "logprobs": True, "prompt_logprobs": True}


@pytest.fixture
def whole(run) -> Path:
    """A finished job of two shards."""
    return run(ROWS, "whole", **OPTIONS)[1]


def say(folder: Path, **changed: Any) -> None:
    """Change the manifest."""
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))


def interrupted(folder: Path, kind: str, lines: list[Any]) -> None:
    """As if the job had been killed in its first shard, with these lines in the journal."""
    part = folder / f"part-00000-of-00002.{kind}"
    part.unlink()
    say(folder, state="running")
    (folder / f".{part.name}.journal").write_text("".join(json.dumps(line) + "\n" for line in lines))


def twice(record: dict[str, Any]) -> dict[str, Any]:
    return {name: record[name] * 2 for name in ("tokens", "logprobs")} | {
        "generated_tokens": 2 * len(record["tokens"]),
        "text": record["text"] * 2,
    }


#: What is changed in the first record of a journal.
FOREIGN: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "another row's id": lambda a: {"id": "q1"},
    "an unknown id": lambda a: {"id": "zzz"},
    "an id of another type": lambda a: {"id": 0},
    "a row of the other shard": lambda a: {"row": 4},
    "a reason that is none": lambda a: {"finish_reason": "banana"},
    "another text": lambda a: {"text": "X" + a["text"]},
    "prompt tokens below 0": lambda a: {"prompt_tokens": -5},
    "prompt tokens beyond int32": lambda a: {"prompt_tokens": 2**40},
    "prompt tokens beyond int64": lambda a: {"prompt_tokens": 2**70},
    "prompt tokens of another prompt": lambda a: {"prompt_tokens": a["prompt_tokens"] + 1},
    "tokens below 0": lambda a: {"tokens": [-1] * len(a["tokens"])},
    "tokens beyond the vocabulary": lambda a: {"tokens": [10**6] * len(a["tokens"])},
    "tokens beyond int32": lambda a: {"tokens": [2**40] * len(a["tokens"])},
    "fewer tokens than it says": lambda a: {"tokens": a["tokens"][1:]},
    "more tokens than asked for": twice,
    "log-probabilities that are none": lambda a: {"logprobs": [float("nan")] * len(a["logprobs"])},
    "log-probabilities above 0": lambda a: {"logprobs": [5.0] * len(a["logprobs"])},
    "log-probabilities beyond float32": lambda a: {"logprobs": [-1e300] * len(a["logprobs"])},
    "too few log-probabilities": lambda a: {"logprobs": a["logprobs"][1:]},
    "no log-probabilities": lambda a: {"logprobs": None},
    "prompt log-probabilities that are text": lambda a: {"prompt_logprobs": "x"},
    "prompt log-probabilities of text": lambda a: {"prompt_logprobs": ["x"] * len(a["prompt_logprobs"])},
    "a prompt log-probability left out": lambda a: {"prompt_logprobs": [None, None, *a["prompt_logprobs"][2:]]},
    "a prompt's first log-probability": lambda a: {"prompt_logprobs": [-0.25, *a["prompt_logprobs"][1:]]},
    "too few prompt log-probabilities": lambda a: {"prompt_logprobs": a["prompt_logprobs"][:-1]},
    "an error beside the answer": lambda a: {"error": "hmm"},
    "no error beside the answer": lambda a: {"error": None},
    "another key": lambda a: {"zzz": [1]},
}


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("change", FOREIGN)
def test_a_record_that_cannot_be_the_jobs_is_answered_again(run, whole, change, kind):
    if kind == "parquet":
        pytest.importorskip("pyarrow")
    first, second, _ = records(whole)[:3]
    _, folder = run(ROWS, "out", format=kind, **OPTIONS)
    before = contents(folder)
    interrupted(folder, kind, [[second], [first | FOREIGN[change](first)]])
    assert run(ROWS, "out", format=kind, **OPTIONS)[0].answered == 2
    after = contents(folder)
    assert {name: after[name] for name in after if name != "manifest.json"} == {
        name: before[name] for name in before if name != "manifest.json"
    }


#: A journal of three records, and how many of the shard's rows are answered when the job goes on.
JOURNALS: dict[str, tuple[Callable[..., list[Any]], int]] = {
    "as it was written": (lambda a, b, c: [[b, a]], 1),
    "an error of a row": (lambda a, b, c: [[{"row": 0, "id": "q0", "error": "No."}], [b]], 1),
    "ids that are swapped": (lambda a, b, c: [[a | {"id": "q1"}, b | {"id": "q0"}]], 3),
    "a row twice in a line": (lambda a, b, c: [[a, a, b]], 3),
    "a row in two lines": (lambda a, b, c: [[a], [b], [b | {"text": ""}], [c]], 1),
    "keys in another order": (lambda a, b, c: [[dict(reversed(a.items())), b]], 3),
    "an error that says nothing": (lambda a, b, c: [[{"row": 0, "id": "q0", "error": ""}]], 3),
    "an error without end": (lambda a, b, c: [[{"row": 0, "id": "q0", "error": "x" * 5000}]], 3),
    "another row's error": (lambda a, b, c: [[{"row": 0, "id": "q1", "error": "No."}]], 3),
    "an error with tokens": (lambda a, b, c: [[{"row": 0, "id": "q0", "prompt_tokens": 3, "error": "No."}]], 3),
    "no record": (lambda a, b, c: [None, [a]], 3),
}


@pytest.mark.parametrize("case", JOURNALS)
def test_what_a_journal_holds_of_the_job_is_kept(run, whole, case):
    made, answered = JOURNALS[case]
    before, given = contents(whole), records(whole)[:3]
    interrupted(whole, "jsonl", made(*given))
    report, _ = run(ROWS, "whole", **OPTIONS)
    assert (report.answered, report.already) == (answered, len(ROWS) - answered)
    if case == "an error of a row":
        assert [record.get("error") for record in records(whole)[:3]] == ["No.", None, None]
    else:
        assert {name for name, data in contents(whole).items() if data != before.get(name)} <= {"manifest.json"}


#: Manifests of a finished job that were changed by hand, and a word of the refusal.
MANIFESTS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "larger shards": (lambda a: a | {"shard_rows": 6}, "2 shards"),
    "larger shards, and their number": (lambda a: a | {"shard_rows": 6, "shards": 1}, "1 shard;"),
    "smaller shards": (lambda a: a | {"shard_rows": 2}, "2 shards"),
    "smaller shards, and their number": (lambda a: a | {"shard_rows": 2, "shards": 3}, "3 shards"),
    "another number of shards": (lambda a: a | {"shards": 3}, "3 shards"),
    "a number of shards that is text": (lambda a: a | {"shards": "2"}, "'2' shards"),
    "a number of shards that is true": (lambda a: a | {"shards": True}, "2"),
    "shards of a fraction": (lambda a: a | {"shard_rows": 3.0}, "shard_rows"),
    "rows of a fraction": (lambda a: a | {"job": a["job"] | {"input": a["job"]["input"] | {"rows": 6.0}}}, "rows"),
    "an option of another type": (lambda a: a | {"job": a["job"] | {"chat": 1}}, "chat"),
    "no number of the format": (lambda a: {k: v for k, v in a.items() if k != "kvjax batch"}, "kvjax batch"),
    "the format as a fraction": (lambda a: a | {"kvjax batch": 1.0}, "version"),
    "no object": (lambda a: [a], "manifest"),
}


@pytest.mark.parametrize("case", MANIFESTS)
def test_a_changed_manifest_is_refused_and_nothing_written(run, whole, case):
    change, word = MANIFESTS[case]
    path = whole / "manifest.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    before = contents(whole)
    with pytest.raises(UsageError, match=word) as caught:
        run(ROWS, "whole", **OPTIONS)
    assert len(str(caught.value)) < 300 + len(str(path)) and contents(whole) == before


def test_a_key_twice_in_a_manifest_is_refused(run, whole):
    path = whole / "manifest.json"
    path.write_text(path.read_text().replace('"shard_rows": 3', '"shard_rows": 2, "shard_rows": 3'))
    with pytest.raises(UsageError, match="twice"):
        run(ROWS, "whole", **OPTIONS)


def test_a_manifest_of_whole_numbers_still_counts(run):
    """Earlier versions wrote an option as it was given, 0 or 0.0."""
    _, folder = run(ROWS, "zero", shard_rows=3, temperature=0.0)
    path = folder / "manifest.json"
    content = json.loads(path.read_text())
    content["job"]["options"]["temperature"] = 0
    path.write_text(json.dumps(content))
    assert run(ROWS, "zero", shard_rows=3, temperature=0)[0].already == len(ROWS)


def _changed(line: bytes, **values: Any) -> bytes:
    """A record with other values."""
    return json.dumps(json.loads(line) | values).encode() + b"\n"


#: What is done to the bytes of a finished shard.
DAMAGED: dict[str, Callable[[bytes], bytes]] = {
    "cut off": lambda data: data[: len(data) // 2],
    "its last byte gone": lambda data: data[:-1],
    "zeros in its midst": lambda data: data[:200] + b"\0" * 64 + data[264:],
    "zeros at its end": lambda data: data + b"\0" * 512,
    "all zeros": lambda data: b"\0" * len(data),
    "text": lambda data: b"hello\n",
}
#: What is done to the lines of a finished shard of JSON lines.
LINES: dict[str, Callable[[list[bytes]], list[bytes]]] = {
    "a line missing": lambda lines: lines[:-1],
    "a line twice": lambda lines: [lines[0], *lines],
    "another line twice": lambda lines: [lines[0], lines[0], lines[2]],
    "two lines swapped": lambda lines: [lines[1], lines[0], lines[2]],
    "an empty line": lambda lines: [lines[0], b"\n", *lines[1:]],
    "no object": lambda lines: [b"[0]\n", *lines[1:]],
    "a row that is text": lambda lines: [lines[0].replace(b'"row": 0', b'"row": "0"'), *lines[1:]],
    "another row's number": lambda lines: [lines[0].replace(b'"row": 0', b'"row": 5'), *lines[1:]],
    "neither answer nor error": lambda lines: [b'{"row": 0}\n', *lines[1:]],
    "a text that is none": lambda lines: [_changed(lines[0], text=5), *lines[1:]],
    "tokens that are text": lambda lines: [_changed(lines[0], tokens="x"), *lines[1:]],
    "a reason that is none": lambda lines: [_changed(lines[0], finish_reason="zz"), *lines[1:]],
    "another number of tokens": lambda lines: [_changed(lines[0], generated_tokens=-1), *lines[1:]],
    "another row's id": lambda lines: [*lines[:2], _changed(lines[2], id="q0")],
    "an id of another type": lambda lines: [*lines[:2], _changed(lines[2], id=2)],
    "an end of brackets": lambda lines: [*lines[:2], b"[" * 100_000 + b"\n"],
}


def refused(run, folder: Path, part: Path, data: bytes, kind: str) -> None:
    """A run refuses the damaged shard and leaves it; without it, its rows are answered again."""
    whole = part.read_bytes()
    part.write_bytes(data)
    before = contents(folder)
    with pytest.raises(KvjaxError, match="remove it"):
        run(ROWS, folder.name, format=kind, **OPTIONS)
    assert contents(folder) == before
    part.unlink()
    assert run(ROWS, folder.name, format=kind, **OPTIONS)[0].answered == 3 and part.read_bytes() == whole


#: Of a Parquet file the columns of rows and ids alone are read: what happened to another is not seen.
CASES = [
    (case, kind)
    for case in DAMAGED
    for kind in ("jsonl", "parquet")
    if (case, kind) != ("zeros in its midst", "parquet")
]


@pytest.mark.parametrize(("case", "kind"), CASES)
def test_a_damaged_shard_is_no_finished_one(run, case, kind):
    if kind == "parquet":
        pytest.importorskip("pyarrow")
    _, folder = run(ROWS, "out", format=kind, **OPTIONS)
    part = folder / f"part-00000-of-00002.{kind}"
    refused(run, folder, part, DAMAGED[case](part.read_bytes()), kind)


@pytest.mark.parametrize("case", LINES)
def test_a_shard_of_other_lines_is_no_finished_one(run, whole, case):
    part = whole / "part-00000-of-00002.jsonl"
    refused(run, whole, part, b"".join(LINES[case](part.read_bytes().splitlines(keepends=True))), "jsonl")


def test_a_shard_of_another_file_is_no_finished_one(run, whole):
    part, other = (whole / f"part-0000{i}-of-00002.jsonl" for i in range(2))
    refused(run, whole, part, other.read_bytes(), "jsonl")


def test_shards_in_the_order_of_ids_are_checked_in_it(run):
    rows = [{"prompt": text, "id": 10 - i} for i, text in enumerate(prompts(5))]
    _, folder = run(rows, "ids", order="id", shard_rows=3)
    assert run(rows, "ids", order="id", shard_rows=3)[0].already == 5
    part = folder / "part-00001-of-00002.jsonl"
    part.write_bytes(b"".join(reversed(part.read_bytes().splitlines(keepends=True))))
    with pytest.raises(KvjaxError, match="disorder"):
        run(rows, "ids", order="id", shard_rows=3)
