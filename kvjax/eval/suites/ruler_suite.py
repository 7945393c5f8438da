"""The suite ``ruler``: RULER's 13 tasks (Hsieh et al. 2024, arXiv:2404.06654) at one length."""

from __future__ import annotations

from kvjax.checkpoints.load import LanguageModel
from kvjax.checks import whole_number
from kvjax.errors import UsageError
from kvjax.eval.needle_prompts import template_tokens
from kvjax.eval.ruler import Sample, find_task
from kvjax.eval.suites import documents_qa, tracking, word_lists
from kvjax.eval.suites.data import DataFolder
from kvjax.eval.suites.essays import essay_text, need_essays
from kvjax.eval.suites.item import Asked, Item, Suite
from kvjax.eval.suites.needles import ESSAY_TASKS, needle_samples
from kvjax.eval.suites.prompts import tokens_of

TASKS = (
    "niah_single_1",
    "niah_single_2",
    "niah_single_3",
    "niah_multikey_1",
    "niah_multikey_2",
    "niah_multikey_3",
    "niah_multivalue",
    "niah_multiquery",
    "vt",
    "cwe",
    "fwe",
    "qa_1",
    "qa_2",
)
#: Tasks that are drawn from nothing but random numbers and lists of words.
WITHOUT_DATA = tuple(task for task in TASKS if task not in ESSAY_TASKS and task not in documents_qa.PLACES)
_TOKENS = {"vt": tracking.MAX_NEW_TOKENS, "cwe": word_lists.COMMON_TOKENS, "fwe": word_lists.FREQUENT_TOKENS}
#: Tokens at most that a prompt takes more where its context and its question are read apart, as they are here.
_APART = 4
_INSTEAD = f", or choose tasks that need none: --tasks {','.join(WITHOUT_DATA)}"


def _check(data: DataFolder, asked: Asked) -> None:
    for task in asked.tasks:
        if task in ESSAY_TASKS:
            essay_text(need_essays(data, f"{task} hides its needles in", _INSTEAD))
        elif task in documents_qa.PLACES:
            path = data.need(f"the text of {task}", *documents_qa.PLACES[task], instead=_INSTEAD)
            documents_qa.read_questions(task, path)


def _items(lm: LanguageModel, data: DataFolder, asked: Asked) -> list[Item]:
    return [item for task in asked.tasks for item in _task_items(lm, data, asked, task)]


def _task_items(lm: LanguageModel, data: DataFolder, asked: Asked, task: str) -> list[Item]:
    if asked.length is None or asked.limit is None:
        raise UsageError("ruler draws its samples; give --length and --limit.")
    whole_number("--limit", asked.limit, 1)
    most, found = lm.config.max_position, list[Item]()
    for spare in range(_APART + 1):
        samples = _samples(lm, data, task, asked.length, asked.limit, asked.seed, template_tokens(lm) + spare)
        found = [_item(task, sample) for sample in samples]
        if asked.length <= most - _APART or all(tokens_of(lm, item) <= most for item in found):
            break
    return found


def _item(task: str, sample: Sample) -> Item:
    of_documents = task in documents_qa.PLACES
    return Item(
        id=f"{task}/{sample.index}",
        task=task,
        context=sample.context,
        question=sample.question,
        answer_prefix=sample.answer_prefix,
        answers=sample.outputs,
        metric="string_match_part" if of_documents else "string_match_all",
        max_new_tokens=documents_qa.MAX_NEW_TOKENS if of_documents else _TOKENS.get(task, 128),
    )


def _samples(
    lm: LanguageModel, data: DataFolder, task: str, length: int, limit: int, seed: int, template: int
) -> list[Sample]:
    tokenizer = lm.tokenizer
    if task == "vt":
        return tracking.tracking_samples(tokenizer, length, limit, seed, template)
    if task == "cwe":
        more = data.find(word_lists.ENGLISH_WORDS)
        return word_lists.common_samples(tokenizer, length, limit, seed, template, more)
    if task == "fwe":
        return word_lists.frequent_samples(tokenizer, length, limit, seed, template)
    if task in documents_qa.PLACES:
        path = data.need(f"the text of {task}", *documents_qa.PLACES[task])
        return documents_qa.document_samples(tokenizer, task, path, length, limit, seed, template)
    if task in ESSAY_TASKS:
        essays = essay_text(need_essays(data, f"{task} hides its needles in"))
        return needle_samples(tokenizer, task, essays, length, limit, seed, template)
    find_task(task)
    return needle_samples(tokenizer, task, None, length, limit, seed, template)


RULER = Suite(
    name="ruler",
    title="RULER: 13 tasks of retrieval, tracking, aggregation and question answering",
    tasks=TASKS,
    about=(
        "Score: the mean of the tasks. string_match_all is the fraction of the expected strings that an answer "
        "contains; qa_1 and qa_2 (string_match_part) ask for any of them. The length counts the template and the "
        "answer's tokens; below 4,096 tokens haystacks go in smaller steps than the benchmark's, which begins there."
    ),
    items=_items,
    check=_check,
    length=4096,
    limit=5,
)
