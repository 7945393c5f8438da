"""RULER's needle tasks in essays: the haystack that needs a text."""

from __future__ import annotations

import itertools
import random

from kvjax.eval import ruler
from kvjax.eval.ruler import NeedleTask, Sample
from kvjax.eval.suites.essays import cycled, essay_words, sentences

#: The benchmark's tasks whose haystack is an essay.
ESSAY_TASKS: dict[str, NeedleTask] = {
    "niah_single_2": NeedleTask("essay"),
    "niah_single_3": NeedleTask("essay", value="uuids"),
    "niah_multikey_1": NeedleTask("essay", keys=4),
    "niah_multivalue": NeedleTask("essay", values=4),
    "niah_multiquery": NeedleTask("essay", keys=4, queries=4),
}
#: Depths that needles are put at, in percent: NumPy's ``round(linspace(0, 100, 40))``.
DEPTHS = [round(100 * place / 39) for place in range(40)]


class EssayDraw(ruler.Draw):
    """Draws samples whose haystack is the first words of an essay; a needle stands between two sentences."""

    def __init__(self, task: NeedleTask, seed: int, essays: str):
        super().__init__(task, random.Random(seed), seed)
        self._words = essay_words(essays)

    def text(self, count: int, needles: list[str]) -> str:
        pieces = sentences(" ".join(cycled(self._words, count)).strip())
        depths = self.rng.sample(DEPTHS, len(needles))
        places = [0, *sorted(int(len(pieces) * (depth / 100)) for depth in depths), len(pieces)]
        parts = []
        for number, (start, end) in enumerate(itertools.pairwise(places)):
            parts.append(" ".join(pieces[start:end]))
            parts += needles[number : number + 1]
        return " ".join(parts)


def needle_samples(
    tokenizer: ruler.Encoder, task: str, essays: str | None, length: int, samples: int, seed: int, template_tokens: int
) -> list[Sample]:
    """Samples of one of the benchmark's eight needle tasks; ``essays`` for those that hide needles in them."""
    if task not in ESSAY_TASKS:
        return ruler.make_samples(
            tokenizer, task, length=length, samples=samples, seed=seed, template_tokens=template_tokens
        )
    assert essays is not None, "the suite's check asks for them"
    draw = EssayDraw(ESSAY_TASKS[task], seed, essays)
    # The benchmark takes 500 words at its lengths, which begin at 4,096; below that so many would be all there is.
    step = 500 if length >= 4096 else 50
    return ruler.draw_samples(tokenizer, draw, length, samples, step, draw.task.max_new_tokens, template_tokens)
