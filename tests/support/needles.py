"""Run RULER's needle tasks on a loaded model: the context is compressed before the question is known."""

from __future__ import annotations

import dataclasses
import math
import statistics

from kvjax.checkpoints.load import LanguageModel
from kvjax.checks import whole_number
from kvjax.eval.needle_prompts import prompt_ids, template_tokens
from kvjax.eval.ruler import NeedleTask, Sample, find_task, make_samples, match_all
from kvjax.generation import generate
from kvjax.policies.base import Policy


@dataclasses.dataclass(frozen=True)
class NeedleAnswer:
    """One sample, what the model answered, and what it had kept.

    Attributes:
      score: fraction of the expected strings in the answer, 0 to 1.
      cache_bytes: bytes of the slots in use when the answer was complete; ``full_cache_bytes``: without compression.
    """

    sample: Sample
    text: str
    score: float
    cache_bytes: int
    full_cache_bytes: int


@dataclasses.dataclass(frozen=True)
class NeedleResult:
    """Answers of one policy at one length, in the order of the samples: two results of one seed compare in pairs."""

    policy: Policy | str | None
    length: int
    answers: tuple[NeedleAnswer, ...]

    @property
    def hits(self) -> int:
        """Samples answered completely."""
        return sum(answer.score == 1 for answer in self.answers)

    @property
    def accuracy(self) -> float:
        """Mean score, 0 to 1; times 100 it is the benchmark's."""
        return statistics.fmean(answer.score for answer in self.answers)

    @property
    def standard_error(self) -> float:
        """Standard error of ``accuracy`` over the samples; NaN for a single one."""
        if len(self.answers) < 2:
            return math.nan
        return statistics.stdev(answer.score for answer in self.answers) / math.sqrt(len(self.answers))

    @property
    def cache_share(self) -> float:
        """Mean of each sample's cache bytes over those of the full cache."""
        return statistics.fmean(answer.cache_bytes / answer.full_cache_bytes for answer in self.answers)


def run_needles(
    lm: LanguageModel,
    policy: Policy | str | None,
    length: int,
    samples: int,
    *,
    task: str | NeedleTask = "niah_single_1",
    max_new_tokens: int | None = None,
    ask_after: bool = True,
    batch: int = 1,
    seed: int = 42,
) -> NeedleResult:
    """Hide needles in ``samples`` contexts and ask for them.

    Questions are asked in the model's chat template when it has one, with the benchmark's answer prefix as the
    beginning of the answer; otherwise as plain text.

    Args:
      lm: the model.
      policy: what the cache keeps, as ``generate`` takes it.
      length: tokens of context, question, template and answer together.
      samples: how many contexts.
      task: a name in ``kvjax.eval.ruler.TASKS`` or a task of your own.
      max_new_tokens: tokens of the answer; the task's own when None.
      ask_after: compress the context alone and ask afterwards; else the question is in view of the compression.
      batch: samples answered at once; each row is compressed on its own.
      seed: of the samples. Greedy decoding draws nothing else.

    Raises:
      UsageError: a bad request, as ``make_samples`` and ``generate`` say.
    """
    whole_number("batch", batch, 1)
    task = find_task(task)
    max_new_tokens = task.max_new_tokens if max_new_tokens is None else max_new_tokens
    made = make_samples(
        lm.tokenizer,
        task,
        length=length,
        samples=samples,
        seed=seed,
        max_new_tokens=max_new_tokens,
        template_tokens=template_tokens(lm),
    )
    answers: list[NeedleAnswer] = []
    for start in range(0, samples, batch):
        answers += _answer(lm, made[start : start + batch], policy, max_new_tokens, ask_after)
    return NeedleResult(policy, length, tuple(answers))


def _answer(
    lm: LanguageModel, group: list[Sample], policy: Policy | str | None, max_new_tokens: int, ask_after: bool
) -> list[NeedleAnswer]:
    asked = [prompt_ids(lm, sample) for sample in group]
    contexts, questions = [context for context, _ in asked], [question for _, question in asked]
    if ask_after:
        caches = [output.cache for output in generate(lm, contexts, policy=policy, max_new_tokens=0)]
        outputs = generate(lm, questions, cache=caches, max_new_tokens=max_new_tokens)
    else:
        wholes = [context + question for context, question in asked]
        outputs = generate(lm, wholes, policy=policy, max_new_tokens=max_new_tokens)
    return [
        NeedleAnswer(
            sample,
            output.text,
            match_all(output.text, sample.outputs),
            output.stats.live_cache_bytes,
            output.stats.full_cache_bytes,
        )
        for sample, output in zip(group, outputs, strict=True)
    ]
