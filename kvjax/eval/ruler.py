"""RULER's needle-in-a-haystack tasks (Hsieh et al. 2024, arXiv:2404.06654): generator and scorer.

Prompts, haystacks, sizes and the order of random draws are the benchmark's own, so the same seed and tokenizer give
its samples, text for text. A sample keeps context and question apart: the context can be compressed before the
question is known. Essay haystacks need a corpus that this package does not carry, and are in ``suites``, which is
given one; where the benchmark hides several keys or values in essays, the ``noise_`` tasks hide as many in noise.
"""

from __future__ import annotations

import dataclasses
import random
import re
import uuid
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

from kvjax.checks import whole_number
from kvjax.errors import UsageError, listed, quoted
from kvjax.eval.words import word_pairs
from kvjax.halving import largest

Kind = Literal["numbers", "words", "uuids"]

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = "One of the special magic {kind} for {key} is: {value}."
INTRODUCTION = (
    "Some special magic {kind} are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n"
)
QUESTION = "What are all the special magic {kind} for {query} mentioned in the provided text?"
ANSWER_PREFIX = " The special magic {kind} for {query} mentioned in the provided text are"


class Encoder(Protocol):
    """A tokenizer, as far as the generator needs it."""

    def encode(self, text: str) -> list[int]: ...


@dataclasses.dataclass(frozen=True)
class NeedleTask:
    """One task: what hides where, and how much of it.

    Attributes:
      haystack: "noise" repeats one line; "needle" is made of distractors that look like the needle; "essay" is text
        that the caller has.
      key, value: kinds of the needle's two parts.
      keys, values, queries: needles of different keys, values of each key, keys that are asked about.
      max_new_tokens: the answer's tokens, counted in a sample's length.
    """

    haystack: Literal["noise", "needle", "essay"]
    key: Kind = "words"
    value: Kind = "numbers"
    keys: int = 1
    values: int = 1
    queries: int = 1
    max_new_tokens: int = 128

    def __post_init__(self) -> None:
        if not 1 <= self.queries <= self.keys or self.values < 1:
            raise UsageError(
                f"A needle task needs at least one query and value, and as many keys as queries; "
                f"got {self.keys} keys, {self.values} values, {self.queries} queries."
            )


#: Names that begin with ``niah_`` are the benchmark's own tasks. Those that begin with ``noise_`` are not: they have
#: the keys, values and queries of its niah_multikey_1, niah_multivalue and niah_multiquery in noise instead of essays,
#: and their scores compare with each other only.
TASKS: dict[str, NeedleTask] = {
    "niah_single_1": NeedleTask("noise"),
    "niah_multikey_2": NeedleTask("needle"),
    "niah_multikey_3": NeedleTask("needle", key="uuids", value="uuids"),
    "noise_multikey": NeedleTask("noise", keys=4),
    "noise_multivalue": NeedleTask("noise", values=4),
    "noise_multiquery": NeedleTask("noise", keys=4, queries=4),
}


@dataclasses.dataclass(frozen=True)
class Sample:
    """One question about one context.

    Attributes:
      context: everything before the question, the introduction included, ending in a newline.
      question: asked after it. ``answer_prefix``: the answer's beginning, with its leading space, given to the model.
      outputs: every string a right answer contains.
      length: tokens of the whole prompt plus those reserved for the answer, as the benchmark counts.
    """

    index: int
    context: str
    question: str
    answer_prefix: str
    outputs: tuple[str, ...]
    length: int

    @property
    def prompt(self) -> str:
        """The benchmark's whole prompt for a model without a chat template."""
        return self.context + self.question + self.answer_prefix


def find_task(task: str | NeedleTask) -> NeedleTask:
    """The task of that name; a task is returned as it is. UsageError names the known ones."""
    if isinstance(task, NeedleTask):
        return task
    if task not in TASKS:
        raise UsageError(f"There is no task {quoted(task)}; known are {listed(TASKS, 200)}.")
    return TASKS[task]


def answer_room(tokenizer: Encoder, task: str | NeedleTask) -> int:
    """Tokens that a plain answer to the task takes with this tokenizer, with some to spare.

    The benchmark reserves 128, which at short lengths is much of the sample, and a decode step costs the same whether
    its token matters. Each expected string gets its own tokens and four for what separates it from the next.
    """
    task = find_task(task)
    kind = task.value
    rng = random.Random(0)
    draw = Draw(task, rng, 0)
    longest = max(len(tokenizer.encode(f" {draw.value(kind)}")) for _ in range(32))
    return task.queries * task.values * (longest + 4) + 6


def make_samples(
    tokenizer: Encoder,
    task: str | NeedleTask = "niah_single_1",
    *,
    length: int,
    samples: int,
    seed: int = 42,
    max_new_tokens: int | None = None,
    template_tokens: int = 0,
) -> list[Sample]:
    """Samples whose prompt, answer and template together fill ``length`` tokens as far as whole lines allow.

    Args:
      tokenizer: the model's own; a length means nothing without it.
      task: a name in ``TASKS`` or a task of your own.
      length: tokens, the answer's included.
      samples: how many.
      seed: of every random draw; the benchmark uses 42.
      max_new_tokens: tokens reserved for the answer; the task's own (128) when None.
      template_tokens: tokens kept free for a chat template.

    Raises:
      UsageError: an unknown task, or a length too short for its smallest haystack.
    """
    task = find_task(task)
    whole_number("samples", samples, 1)
    reserved = task.max_new_tokens if max_new_tokens is None else max_new_tokens
    step = max(5 if length < 4096 else 25, task.keys * task.values)
    draw = Draw(task, random.Random(seed), seed)
    return draw_samples(tokenizer, draw, length, samples, step, reserved, template_tokens)


def draw_samples(
    tokenizer: Encoder, draw: Draw, length: int, samples: int, step: int, reserved: int, template_tokens: int
) -> list[Sample]:
    """Samples of a task in the largest haystack that fits; ``step``: what is taken from one that is too large."""
    room, needles = length - template_tokens, draw.task.keys * draw.task.values

    def tokens(sample: Sample) -> int:
        return len(tokenizer.encode(sample.prompt)) + reserved

    size = _fit(draw, tokens, room, step, reserved)
    made = []
    for index in range(samples):
        sample, lines = draw.sample(index, size), size
        while tokens(sample) > room:
            # The benchmark takes lines away and draws again until it fits.
            lines -= step
            if lines < needles:
                least = tokens(sample) + template_tokens
                raise UsageError(f"{length} tokens are too few for the task: its smallest sample takes {least}.")
            sample = draw.sample(index, lines)
        made.append(dataclasses.replace(sample, length=tokens(sample) + template_tokens))
    return made


def _fit(draw: Draw, tokens: Callable[[Sample], int], room: int, step: int, reserved: int) -> int:
    """Lines of the largest haystack that fits, by the benchmark's binary search."""
    per_line = (tokens(draw.sample(0, step)) - reserved) / step
    most = max(int(room / per_line * 3), step * 2)
    return largest(step, most, lambda lines: tokens(draw.sample(0, lines)) <= room) or step


class Draw:
    """Draws samples; the order of draws is the benchmark's."""

    def __init__(self, task: NeedleTask, rng: random.Random, seed: int):
        self.task, self.rng, self.seed = task, rng, seed
        self.single = task.queries * task.values == 1

    def value(self, kind: Kind) -> str:
        if kind == "numbers":
            return str(self.rng.randint(1_000_000, 9_999_999))
        if kind == "words":
            return self.rng.choice(word_pairs())
        return str(uuid.UUID(int=self.rng.getrandbits(128), version=4))

    def needle(self, key: str) -> tuple[str, str]:
        value = self.value(self.task.value)
        return value, NEEDLE.format(kind=self.task.value, key=key, value=value)

    def lines(self, count: int, needles: list[str]) -> list[str]:
        if self.task.haystack == "noise":
            lines = [NOISE] * count
        else:
            lines = [self.needle(self.value(self.task.key))[1] for _ in range(count)]
        places = sorted(self.rng.sample(range(count), len(needles)), reverse=True)
        for place, needle in zip(places, needles, strict=True):
            lines.insert(place, needle)
        return lines

    def text(self, count: int, needles: list[str]) -> str:
        """A haystack of so many units with the needles in it."""
        return "\n".join(self.lines(count, needles))

    def sample(self, index: int, count: int) -> Sample:
        task = self.task
        keys, values, needles = [], [], []
        for _ in range(task.keys):
            keys.append(self.value(task.key))
            drawn = [self.needle(keys[-1]) for _ in range(task.values)]
            values.append([value for value, _ in drawn])
            needles += [needle for _, needle in drawn]
        # The same permutation in every sample: a fresh generator from the global seed.
        random.Random(self.seed).shuffle(needles)
        text = self.text(count, needles)
        asked = self.rng.sample(range(task.keys), task.queries)
        names = [keys[i] for i in asked]
        query = f"{', '.join(names[:-1])}, and {names[-1]}" if len(names) > 1 else names[0]
        return Sample(
            index=index,
            context=f"{self.fill(INTRODUCTION, query)}{text}\n",
            question=self.fill(QUESTION, query),
            answer_prefix=self.fill(ANSWER_PREFIX, query),
            outputs=tuple(value for i in asked for value in values[i]),
            length=0,
        )

    def fill(self, template: str, query: str) -> str:
        kind = self.task.value
        if self.single:
            template = template.replace("Some", "A").replace("are all", "is").replace("are", "is")
            kind = kind[:-1]
        return template.format(kind=kind, query=query)


def post_process(text: str) -> str:
    """The benchmark's clean-up of an answer: control characters become newlines, the ends are stripped."""
    return re.sub(r"[\x00-\x1f]", "\n", text.strip()).strip()


def match_all(text: str, outputs: Sequence[str]) -> float:
    """The fraction of the expected strings that the answer contains, letter case ignored: 0 to 1."""
    text = post_process(text).lower()
    return sum(output.lower() in text for output in outputs) / len(outputs)


def string_match_all(texts: Sequence[str], outputs: Sequence[Sequence[str]]) -> float:
    """The benchmark's score of a task: the mean of ``match_all`` in percent, rounded to two decimals."""
    if len(texts) != len(outputs) or not texts:
        raise UsageError(f"Scoring needs one answer for each sample; got {len(texts)} for {len(outputs)}.")
    return round(100 * sum(map(match_all, texts, outputs)) / len(texts), 2)
