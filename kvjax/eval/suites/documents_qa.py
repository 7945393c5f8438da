"""RULER's question answering: one document has the answer, among others of SQuAD or HotpotQA."""

from __future__ import annotations

import dataclasses
import itertools
import random
from pathlib import Path
from typing import Any

from kvjax.errors import UsageError
from kvjax.eval.ruler import Encoder, Sample
from kvjax.eval.suites.data import read_json
from kvjax.eval.suites.haystack_size import largest, too_short

MAX_NEW_TOKENS = 32
#: The files of each task.
PLACES: dict[str, tuple[str, ...]] = {
    "qa_1": ("ruler/squad_dev_v2.0.json", "ruler/squad.json"),
    "qa_2": (
        "ruler/hotpotqa.json",
        "ruler/hotpot_dev_distractor_v1.json",
        "ruler/hotpot_dev_distractor_first1000.json",
    ),
}
_INSTRUCTION = (
    "Answer the question based on the given documents. Only give me the answer and do not output any other words."
)
CONTEXT = _INSTRUCTION + "\n\nThe following are given documents.\n\n{context}\n\n"
QUESTION = _INSTRUCTION + "\n\nQuestion: {query}"
ANSWER_PREFIX = " Answer:"


@dataclasses.dataclass(frozen=True)
class Question:
    """A question, its answers, and numbers of documents: those that hold the answer, and those of the same article."""

    query: str
    outputs: tuple[str, ...]
    gold: tuple[int, ...]
    same: tuple[int, ...] = ()


def read_questions(task: str, path: Path) -> tuple[list[Question], list[str]]:
    """The questions and documents of a task's file; UsageError where it is no such file."""
    content = read_json(path)
    try:
        questions, documents = _squad(content) if task == "qa_1" else _hotpot(content)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        kind = "SQuAD 2.0" if task == "qa_1" else "HotpotQA (distractor)"
        raise UsageError(f"{path} is no file of {kind} questions.") from error
    for number, one in enumerate(questions, 1):
        if not all(isinstance(text, str) and text.strip() for text in (one.query, *one.outputs)) or not one.outputs:
            raise UsageError(f"{path}: question {number} lacks its text or an answer to it.")
        if not one.gold:
            raise UsageError(f"{path}: question {number} lacks the documents that hold its answer.")
    if not all(isinstance(text, str) for text in documents):
        raise UsageError(f"{path} holds a document that is no text.")
    if not questions:
        raise UsageError(f"{path} holds no questions.")
    return questions, documents


def _squad(content: Any) -> tuple[list[Question], list[str]]:
    articles = [article["paragraphs"] for article in content["data"]]
    documents = sorted({paragraph["context"] for article in articles for paragraph in article})
    place = {text: number for number, text in enumerate(documents)}
    found = []
    for article in articles:
        numbers = [place[paragraph["context"]] for paragraph in article]
        for paragraph, mine in zip(article, numbers, strict=True):
            others = tuple(number for number in numbers if number != mine)
            for asked in paragraph["qas"]:
                if not asked["is_impossible"]:
                    answers = tuple(answer["text"] for answer in asked["answers"])
                    found.append(Question(asked["question"], answers, (mine,), others))
    return found, documents


def _hotpot(content: Any) -> tuple[list[Question], list[str]]:
    texts = [[f"{title}\n{''.join(parts)}" for title, parts in asked["context"]] for asked in content]
    documents = sorted({text for given in texts for text in given})
    place = {text: number for number, text in enumerate(documents)}
    return [
        Question(asked["question"], (asked["answer"],), tuple(place[text] for text in given))
        for asked, given in zip(content, texts, strict=True)
    ], documents


def document_samples(
    tokenizer: Encoder, task: str, path: Path, length: int, samples: int, seed: int, template_tokens: int
) -> list[Sample]:
    """Sample i asks question i; a question whose own documents exceed a short length gives way to the next."""
    questions, documents = read_questions(task, path)
    rng = random.Random(seed)
    # The benchmark goes in tens of documents, which at lengths below its own are more than fit.
    room, step = length - template_tokens, 10 if length >= 4096 else 1

    def draw(question: Question, count: int) -> Sample:
        chosen = [documents[number] for number in _chosen(rng, question, count, len(documents))]
        random.Random(seed).shuffle(chosen)
        text = "\n\n".join(f"Document {number}:\n{document}" for number, document in enumerate(chosen, 1))
        context, asked = CONTEXT.format(context=text), QUESTION.format(query=question.query)
        return Sample(0, context, asked, ANSWER_PREFIX, question.outputs, 0)

    def tokens(sample: Sample) -> int:
        return len(tokenizer.encode(sample.prompt)) + MAX_NEW_TOKENS

    if length < 4096:
        fitting = (question for question in questions if tokens(draw(question, step)) <= room)
        questions = list(itertools.islice(fitting, samples))
        if not questions:
            raise too_short(length, task)
    per_document = (tokens(draw(questions[0], 10)) - MAX_NEW_TOKENS) / 10
    high = max(int(room / per_document * 3), step * 2)
    count = largest(lambda size: tokens(draw(questions[0], size)), room, step, high)
    made: list[Sample] = []
    for question in questions:
        used = count
        while (cost := tokens(sample := draw(question, used))) > room and used > step:
            used -= step
        if cost <= room:
            prefix, outputs = sample.answer_prefix, sample.outputs
            made.append(Sample(len(made), sample.context, sample.question, prefix, outputs, cost + template_tokens))
        if len(made) == samples:
            return made
    if not made:
        raise too_short(length, task)
    return made


def _chosen(rng: random.Random, question: Question, count: int, documents: int) -> list[int]:
    """Numbers of documents: the question's own, then its article's, then any."""
    gold, same = list(question.gold), list(question.same)
    if count >= documents:
        return [number % documents for number in range(count)]
    if count - len(gold) > len(same):
        taken = {*gold, *same}
        others = [number for number in range(documents) if number not in taken]
        return gold + same + rng.sample(others, count - len(gold) - len(same))
    return gold + rng.sample(same, max(0, count - len(gold)))
