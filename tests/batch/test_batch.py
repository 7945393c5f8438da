"""``kvjax.batch.run`` on one process: the answers of ``generate``, every row once, whatever the rows hold."""

from __future__ import annotations

import json
import sys

import pytest
from support.batch_rows import LENGTHS, SIZE, contents, prompts, records

import kvjax
from kvjax.batch.job import rows_of_shard
from kvjax.batch.rows import PADDING_ROW, Row
from kvjax.batch.work import batches
from kvjax.cache.buckets import prompt_bucket
from kvjax.errors import DoesNotFit, KvjaxError, UsageError
from kvjax.runtime.compilation import compile_clock


def test_answers_are_those_of_one_call_of_generate(run, tiny_model):
    """Batches, shards and inert rows change nothing, not even what is drawn."""
    texts = prompts(SIZE)
    options = dict(temperature=0.9, seed=5, stop="e")
    report, folder = run([{"prompt": text} for text in texts], shard_rows=3, **options)
    expected = kvjax.generate(tiny_model, texts, max_new_tokens=6, **options)
    assert (report.rows, report.answered, report.failed, report.already) == (SIZE, SIZE, 0, 0)
    assert [path.name for path in report.files] == ["part-00000-of-00002.jsonl", "part-00001-of-00002.jsonl"]
    found = records(folder)
    assert [record["row"] for record in found] == [record["id"] for record in found] == list(range(SIZE))
    for record, output in zip(found, expected, strict=True):
        assert record["tokens"] == list(output.tokens)
        assert record["text"] == output.text and record["finish_reason"] == output.finish_reason
        assert record["prompt_tokens"] == output.stats.prompt_tokens
    assert report.generated_tokens == sum(len(output.tokens) for output in expected)


KEPT = {
    "slots": {"logprobs": True, "prompt_logprobs": True, "stop": "e", "temperature": 0.9, "repetition_penalty": 1.3},
    "rounds": {"policy": "round:watershed=1", "logprobs": True, "max_new_tokens": 9},
}


@pytest.mark.parametrize("case", KEPT)
def test_what_the_model_answered_is_kept_when_a_job_goes_on(run, case):
    """A journal is checked strictly; nothing that the engine or ``generate`` wrote may seem foreign."""
    rows = [{"prompt": text, "id": f"q{i}"} for i, text in enumerate(prompts(3))]
    rows += [
        {"prompt": [{"role": "user", "content": "é 日本"}], "max_new_tokens": 12},
        {"prompt": [5, 6, 7], "id": 2**70},
    ]
    _, folder = run(rows, **KEPT[case])
    before = contents(folder)
    (path,) = folder.glob("part-*")
    (folder / f".{path.name}.journal").write_text(f"[{', '.join(path.read_text().splitlines())}]\n")
    path.unlink()
    report, _ = run(rows, **KEPT[case])
    assert (report.answered, report.already) == (0, len(rows)) and contents(folder) == before


BAD = [
    (b"not json", "not JSON"),
    (b'{"prompt": "a"', "not JSON"),
    (b'{"prompt": "\xff"}', "not UTF-8"),
    (b"[" * 100_000, "nested too deeply"),
    (b"", "line is empty"),
    (b"null", "The line holds a JSON null; give an object"),
    (b'"str"', "The line holds a JSON string; give an object"),
    (b"[1, 2]", "JSON array"),
    ({}, "no prompt"),
    ({"text": "a", "id": "named"}, "no prompt; its keys are 'text', 'id'"),
    ({"prompt": ""}, "empty"),
    ({"prompt": None}, "None was given"),
    ({"prompt": []}, "The prompt is empty"),
    ({"prompt": 5}, "an int was given"),
    ({"prompt": ["a", "b"]}, "list of prompts"),
    ({"prompt": [1, 259]}, "259"),
    ({"prompt": [1, None]}, "token ids holds None"),
    ({"prompt": [{"role": "user", "content": "a"}, 5]}, "messages holds 5"),
    ({"prompt": [{"role": "user"}]}, "content"),
    ({"prompt": "x" * 600}, "this model's context is 512"),
    ({"prompt": "\ud83d"}, "surrogate"),
    ({"prompt": "a", "max_new_tokens": 0}, "max_new_tokens is 0"),
    ({"prompt": "a", "max_new_tokens": "3"}, "max_new_tokens is '3'"),
    ({"prompt": "a", "id": [1]}, "id is [1]"),
    ({"prompt": "a", "id": True}, "id is True"),
    (b'{"prompt": "\x00"}', "Invalid control character at line 1, column 13"),
]


@pytest.mark.usefixtures("quick")
def test_a_bad_row_is_its_own_error_and_stops_nothing(run):
    good = [{"prompt": text, "id": f"q{i}"} for i, text in enumerate(prompts(3))]
    rows = [good[0], *(row for row, _ in BAD), *good[1:], b"", b"  "]
    report, folder = run(rows, shard_rows=10)
    found = records(folder)
    assert [record["row"] for record in found] == list(range(len(BAD) + 3)), "blank lines at the end are no rows"
    assert (report.answered, report.failed) == (3, len(BAD))
    for record, (row, sentence) in zip(found[1:], BAD, strict=False):
        assert sentence in record["error"] and "text" not in record, row
        assert record["error"].endswith(".") and "\n" not in record["error"]
    assert found[10]["id"] == "named" and found[1]["id"] == 1
    assert [record["id"] for record in found if "text" in record] == ["q0", "q1", "q2"]


def test_prompts_may_be_messages_or_ids_and_rows_have_their_own_limits(run, tiny_model):
    messages = [{"role": "user", "content": "hello there"}]
    rows = [
        {"prompt": "hello there", "max_new_tokens": 2, "extra": "is ignored"},
        {"prompt": messages, "max_new_tokens": 9},
        {"prompt": [5, 6, 7], "id": 12345678901234567890},
        {"prompt": "hi"},
    ]
    _, folder = run(rows, logprobs=True)
    text, talk, ids, _ = records(folder)
    assert text["tokens"] == talk["tokens"][:2] and text["finish_reason"] == "length"
    assert [len(record["tokens"]) for record in (text, talk, ids)] == [2, 9, 6]
    alike = kvjax.generate(tiny_model, [messages] * SIZE, max_new_tokens=9, logprobs=True)[1]
    assert talk["tokens"] == list(alike.tokens) and talk["logprobs"] == pytest.approx(alike.logprobs, abs=1e-5)
    assert ids["id"] == 12345678901234567890 and ids["prompt_tokens"] == 3


def test_new_prompts_in_the_same_buckets_compile_nothing(run):
    run([{"prompt": text} for text in prompts(2 * SIZE + 1)], "first")
    with compile_clock() as clock:
        report, _ = run([{"prompt": text} for text in prompts(3 * SIZE + 2, seed=1)], "second", max_new_tokens=5)
    assert clock.programs == 0 and report.answered == 3 * SIZE + 2


def test_batches_go_by_bucket_and_only_the_last_is_filled_up():
    rows = [Row(i, i, (1,) * (1 + 37 * i % 500), 5) for i in range(101)]
    made = batches(rows, 8)
    assert sorted(row.number for batch in made for row in batch) == list(range(101))
    assert [len(batch) for batch in made] == [8] * 12 + [5]
    buckets = [[prompt_bucket(len(row.tokens)) for row in batch] for batch in made]
    assert [max(found) for found in buckets] == sorted((max(found) for found in buckets), reverse=True)
    distinct = {prompt_bucket(len(row.tokens)) for row in rows}
    assert sum(len(set(found)) > 1 for found in buckets) < len(distinct), "one mixed batch a border at most"
    assert len(PADDING_ROW.tokens) == PADDING_ROW.limit == 1


@pytest.mark.parametrize(
    "rows, processes, size, shard",
    [(1, 1, 8, 8), (64, 1, 8, 64), (1000, 3, 16, 16), (1000, 1, 16, 336), (10**6, 4, 16, 4032), (10**5, 4, 16, 768)],
)
def test_shards_are_whole_batches_and_many_where_processes_claim_them(rows, processes, size, shard):
    assert rows_of_shard(rows, processes, size) == shard
    assert -(-rows // shard) <= processes * max(4 if processes == 1 else 34, -(-rows // processes // 4000))


@pytest.mark.usefixtures("quick")
def test_output_by_id(run, monkeypatch):
    names = ["b", 10, "a", 9, None, "B"]
    rows = [{"prompt": "hi", **({} if name is None else {"id": name})} for name in names] + [b"bad"]
    _, folder = run(rows, order="id", shard_rows=4)
    assert [record["id"] for record in records(folder)] == [4, 6, 9, 10, "B", "a", "b"]
    runs = sys.modules["kvjax.batch.batch_run"]  # the package's own name for it is the function
    read, own = [], runs.read_row
    monkeypatch.setattr(runs, "read_row", lambda lm, source, i, **how: read.append(i) or own(lm, source, i, **how))
    run(rows, "again", order="id")
    assert read == sorted(read), "in the input's order, whatever the output's"


@pytest.mark.usefixtures("quick")
def test_parquet_in_and_out(run, tmp_path):
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    texts = prompts(7)
    table = pa.table({"id": [f"q{i}" for i in range(6)] + [None], "prompt": [*texts[:5], None, ""], "other": [0] * 7})
    parquet.write_table(table, tmp_path / "in.parquet", row_group_size=3)
    report, _ = run(tmp_path / "in.parquet", shard_rows=4)
    assert [path.suffix for path in report.files] == [".parquet"] * 2
    found = [row for path in report.files for row in parquet.read_table(path).to_pylist()]
    assert [row["id"] for row in found] == ["q0", "q1", "q2", "q3", "q4", "q5", "6"]
    assert "None was given" in found[5]["error"] and "empty" in found[6]["error"] and found[6]["text"] is None
    _, plain = run([{"prompt": text} for text in texts[:5]], "lines")
    assert [row["tokens"] for row in found[:5]] == [record["tokens"] for record in records(plain)]
    run(tmp_path / "in.parquet", "both", format="jsonl")
    assert [r["tokens"] for r in records(tmp_path / "both")[:5]] == [row["tokens"] for row in found[:5]]
    messages = pa.table({"prompt": [[{"role": "user", "content": texts[0]}]]})
    parquet.write_table(messages, tmp_path / "messages.parquet")
    _, talk = run(tmp_path / "messages.parquet", "talk", format="jsonl")
    assert records(talk)[0]["tokens"] == found[0]["tokens"]
    parquet.write_table(pa.table({"text": ["a"]}), tmp_path / "other.parquet")
    with pytest.raises(UsageError, match="no column 'prompt'; its columns are text"):
        run(tmp_path / "other.parquet", "refused")
    (tmp_path / "no.parquet").write_bytes(b"PAR?")
    with pytest.raises(UsageError, match="not a Parquet file"):
        run(tmp_path / "no.parquet", "refused")


def test_what_does_not_fit_together_is_answered_in_fewer_slots(run, quick, monkeypatch):
    """A prompt that no slot holds is answered by itself, or is its own error; the others have the slots that fit."""
    from kvjax.batch import work

    sizes, alone = [], []

    class Limited(quick):
        def __init__(self, *arguments, slots, prompt_tokens, **more):
            sizes.append((slots, prompt_tokens))
            if prompt_tokens > 100 or slots > 2:
                raise DoesNotFit("Too much.")
            super().__init__(*arguments, slots=slots, prompt_tokens=prompt_tokens, **more)

    def answer(request, between):
        alone.append(len(request.prompts[0]))
        raise DoesNotFit("This needs more than there is.")

    monkeypatch.setattr(work, "EngineCore", Limited)
    monkeypatch.setattr(work, "answer", answer)
    report, folder = run([{"prompt": text} for text in ["a" * 90, "b", "c", "d"]])
    assert sizes == [(4, 128), (2, 128), (1, 128), (4, 64), (2, 64)] and len(alone) == 1 and alone[0] > 100
    assert (report.answered, report.failed) == (3, 1)
    assert records(folder)[0]["error"] == "This needs more than there is."


@pytest.mark.slow
def test_an_answer_that_outgrows_its_slot_is_answered_where_it_has_room(run, tiny_model, monkeypatch):
    """Nothing is cut short that a call of ``generate`` would not cut short."""
    from kvjax.batch import work
    from kvjax.engine.core import EngineCore

    class Small(EngineCore):
        def __init__(self, *arguments, new_tokens, **more):
            super().__init__(*arguments, new_tokens=min(new_tokens, 16), **more)

    monkeypatch.setattr(work, "EngineCore", Small)
    _, folder = run([{"prompt": text} for text in ("a" * 30, "bc")], max_new_tokens=330, batch_size=2, chat=False)
    found = kvjax.generate(tiny_model, ["a" * 30, "bc"], max_new_tokens=330, chat=False)
    assert [r["tokens"] for r in records(folder)] == [list(output.tokens) for output in found]
    assert max(len(output.tokens) for output in found) > 300


REFUSED = {
    "no rows": ({}, b"\n\n", "has no rows"),
    "an order": ({"order": "length"}, b"{}", "order is 'length'; choose 'input' or 'id'"),
    "a format": ({"format": "csv"}, b"{}", "format is 'csv'"),
    "no batch": ({"batch_size": 0}, b"{}", "batch_size is 0"),
    "no shard": ({"shard_rows": 0}, b"{}", "shard_rows is 0"),
    "no tokens": ({"max_new_tokens": 0}, b"{}", "max_new_tokens is 0"),
    "a policy": ({"policy": "lagkw"}, b"{}", "did you mean 'lagkv'"),
    "a temperature": ({"temperature": -1}, b"{}", "temperature is -1"),
    "later turns": ({"reserve_tokens": 64}, b"{}", "batch.run takes no 'reserve_tokens'"),
    "an option's turns": ({"options": kvjax.GenerationOptions(reserve_tokens=0)}, b"{}", "rows have no later turns"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_makes_no_sense_is_refused_before_a_folder_is_made(run, tmp_path, case):
    options, content, sentence = REFUSED[case]
    (tmp_path / "in.jsonl").write_bytes(content)
    with pytest.raises(UsageError) as refused:
        run(tmp_path / "in.jsonl", **options)
    assert sentence in str(refused.value) and not (tmp_path / "out").exists()


def test_what_fits_no_memory_is_refused_before_a_folder_is_made(run, tmp_path):
    with pytest.raises(DoesNotFit):
        run([{"prompt": "a"}], memory_limit=1000)
    assert not (tmp_path / "out").exists()


def test_an_empty_path_is_not_the_current_folder(tiny_model, tmp_path):
    (tmp_path / "in.jsonl").write_text("{}")
    for paths, sentence in (
        ((tmp_path / "in.jsonl", ""), "output is an empty path; name a folder"),
        (("", tmp_path), "input is an"),
    ):
        with pytest.raises(UsageError, match=sentence):
            kvjax.batch.run(tiny_model, *paths, policy="full")


def test_files_that_cannot_be_used(run, tmp_path):
    (tmp_path / "in.txt").write_text("a")
    with pytest.raises(UsageError, match=r"neither \.jsonl nor \.parquet"):
        run(tmp_path / "in.txt")
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        run(tmp_path / "missing.jsonl")
    (tmp_path / "file").write_text("a")
    with pytest.raises(UsageError, match="a folder that cannot be used"):
        run([{"prompt": "a"}], "file")


def test_a_missing_package_is_named(run, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    (tmp_path / "in.parquet").write_bytes(b"PAR1")
    with pytest.raises(KvjaxError, match=r"pip install '\.\[batch\]'"):
        run(tmp_path / "in.parquet")
    assert not (tmp_path / "out").exists()
    with pytest.raises(KvjaxError, match=r"pip install '\.\[batch\]'"):
        run([{"prompt": "a"}], format="parquet")
    assert not (tmp_path / "out").exists(), "before anything runs"


def test_what_no_row_could_have_is_refused_before_any(run):
    with pytest.raises(UsageError, match="prompt_logprobs needs every layer's output"):
        run([{"prompt": "a"}], policy="round:watershed=1", prompt_logprobs=True)


@pytest.mark.usefixtures("quick")
def test_a_first_line_may_begin_with_a_byte_order_mark(run):
    _, folder = run([b"\xef\xbb\xbf" + json.dumps({"prompt": "hi"}).encode(), {"prompt": "hi"}])
    first, second = records(folder)
    assert first["tokens"] == second["tokens"]


def test_lengths_fill_two_buckets(tiny_model):
    """What the other tests rely on."""
    from kvjax.prompts import tokenize

    rows = [
        tokenize(tiny_model, text, context=None, chat=True, onto=False).prompts[0] for text in prompts(len(LENGTHS))
    ]
    assert {prompt_bucket(len(ids)) for ids in rows} == {64, 128}


@pytest.mark.usefixtures("quick")
def test_folder_holds_shards_and_manifest_alone(run):
    _, folder = run([{"prompt": text} for text in prompts(5)], shard_rows=2)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert sorted(contents(folder)) == ["manifest.json", *(f"part-0000{i}-of-00003.jsonl" for i in range(3))]
    assert manifest["state"] == "finished" and manifest["shards"] == 3 and manifest["job"]["policy"] == "full"
    assert manifest["job"]["versions"]["kvjax"] == kvjax.__version__
    assert run([{"prompt": text} for text in prompts(5)], shard_rows=2)[0].answered == 0


@pytest.mark.usefixtures("quick")
def test_numbers_left_out_by_pandas(run, tmp_path):
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    columns = {"prompt": ["a", "b", "c"], "id": [7.0, None, float("nan")], "max_new_tokens": [3.0, 2.5, None]}
    parquet.write_table(pa.table(columns), tmp_path / "in.parquet")
    _, folder = run(tmp_path / "in.parquet", format="jsonl")
    found = records(folder)
    assert [row["id"] for row in found] == [7, 1, 2] and [len(row.get("tokens", ())) for row in found] == [3, 0, 6]
    assert found[1]["error"] == "max_new_tokens is 2.5; give a whole number of at least 1."
    _, folder = run([{"prompt": "a", "max_new_tokens": None}], "lines")
    assert len(records(folder)[0]["tokens"]) == 6


def test_a_damaged_row_group_is_one_sentence(run, tmp_path):
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pa.table({"prompt": ["a", "b"]}), tmp_path / "in.parquet", row_group_size=1)
    content = bytearray((tmp_path / "in.parquet").read_bytes())
    content[4:12] = b"\xff" * 8  # the header of the first page
    (tmp_path / "in.parquet").write_bytes(content)
    with pytest.raises(KvjaxError, match=r"in\.parquet cannot be read from row 0 on"):
        run(tmp_path / "in.parquet")
