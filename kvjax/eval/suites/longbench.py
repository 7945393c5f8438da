"""The suite ``longbench``: LongBench's 21 data sets with their own prompts and metrics."""

from __future__ import annotations

import dataclasses
import re

from kvjax.checkpoints.load import LanguageModel
from kvjax.errors import UsageError, quoted
from kvjax.eval.suites.data import DataFolder, read_rows, read_zipped, rows_of
from kvjax.eval.suites.item import Asked, Item, Suite
from kvjax.eval.suites.longbench_prompts import TASKS
from kvjax.eval.suites.prompts import cut_middle, room_of
from kvjax.eval.suites.text_metrics import need_chinese

#: Whole prompts of all data sets in one file, which stand in for a data set's own.
WHOLE = "longbench/minilongbench_237.jsonl"
_REPOSITORY, _ARCHIVE = "THUDM/LongBench", "data.zip"


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of a data set's own file."""

    input: str
    context: str
    answers: tuple[str, ...]
    all_classes: tuple[str, ...] | None = None


@dataclasses.dataclass(frozen=True)
class WholeRow:
    """A row that holds the whole prompt."""

    dataset: str
    prompt: str
    answers: tuple[str, ...]
    all_classes: tuple[str, ...] | None = None


def parts(task: str, row: Row) -> tuple[str, str]:
    """The context and the question that the benchmark's prompt makes of a row."""
    before, _, after = TASKS[task].prompt.partition("{context}")
    return before + row.context, after.replace("{input}", row.input)


def split_prompt(task: str, prompt: str) -> tuple[str, str]:
    """The context and the question of a whole prompt, cut where the prompt's own words after the context begin.

    White space is not compared, since copies of the benchmark have put some of its misprints right; in one with other
    words, the last line of the benchmark's own is looked for. Where no words stand there, a question begins where the
    last worked example's successor does; of repobench-p the code before the last line is context, since nothing marks
    where the data set's own input begins.
    """
    after = TASKS[task].prompt.partition("{context}")[2]
    fixed, _, rest = after.partition("{input}")
    mark = fixed + TASKS[task].opening if fixed else rest
    space = r"\s+" if mark[:1].isspace() else ""
    for words in dict.fromkeys((mark, mark.strip().split("\n")[-1])):
        letters = r"\s*".join(map(re.escape, "".join(words.split())))
        found = list(re.finditer(space + letters, prompt))
        if found and (place := found[-1].start()):
            return prompt[:place], prompt[place:]
    raise UsageError(f"A prompt of {task} does not hold what LongBench's does after the context: {quoted(mark)}.")


def _read(data: DataFolder, task: str) -> list[tuple[tuple[str, str], Row | WholeRow]]:
    """The rows of a data set, each with its context and question: its own file, else whole prompts, else the hub's."""
    rows, origin = _rows(data, task)
    for number, (_, row) in enumerate(rows, 1):
        lacking = "answers" if not row.answers else "all_classes"
        if not row.answers or (TASKS[task].metric == "classification" and not row.all_classes):
            raise UsageError(f"{origin}, row {number} of {task} has no {lacking}, and cannot be scored.")
    return rows


def _rows(data: DataFolder, task: str) -> tuple[list[tuple[tuple[str, str], Row | WholeRow]], str]:
    places = (f"longbench/{task}.jsonl", f"longbench/data/{task}.jsonl")
    if (path := data.find(*places)) is not None:
        return [(parts(task, row), row) for row in read_rows(path, Row)], str(path)
    if (path := data.find(WHOLE)) is not None:
        rows = [row for row in read_rows(path, WholeRow) if row.dataset == task]
        if rows:
            return [(split_prompt(task, row.prompt), row) for row in rows], str(path)
    archive = data.download(_REPOSITORY, _ARCHIVE, f"LongBench's {task}", [places[0], WHOLE])
    text = read_zipped(archive, f"{task}.jsonl")
    origin = f"{archive}, {task}.jsonl"
    return [(parts(task, row), row) for row in rows_of(text, Row, origin)], origin


def _check(data: DataFolder, asked: Asked) -> None:
    if any(TASKS[task].metric.endswith(" zh") for task in asked.tasks):
        need_chinese()
    for task in asked.tasks:
        _read(data, task)


def _items(lm: LanguageModel, data: DataFolder, asked: Asked) -> list[Item]:
    found = []
    for name in asked.tasks:
        task = TASKS[name]
        room = room_of(lm, asked.length, task.max_new_tokens, chat=task.chat)
        for number, ((context, question), row) in enumerate(_read(data, name)[: asked.limit]):
            context, question = cut_middle(lm, context, question, room)
            found.append(
                Item(
                    id=f"{name}/{number}",
                    task=name,
                    context=context,
                    question=question,
                    answers=row.answers,
                    metric=task.metric,
                    max_new_tokens=task.max_new_tokens,
                    chat=task.chat,
                    classes=row.all_classes or (),
                    groups=(task.group,),
                )
            )
    return found


LONGBENCH = Suite(
    name="longbench",
    title="LongBench: 21 data sets in six groups",
    tasks=tuple(TASKS),
    about=(
        "Score: the mean of the data sets, each with the benchmark's own metric. A prompt that exceeds the length "
        "loses its middle, as in the benchmark. Answers to samsum do not stop at a line's end; their first line is "
        "scored, as is that of trec, triviaqa and lsht."
    ),
    items=_items,
    check=_check,
    length=4096,
    limit=2,
    quick_limit=1,
)
