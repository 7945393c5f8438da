"""Runs the harness's prompts in batches: compressed, then scored or answered."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from kvjax import progress
from kvjax.checkpoints.load import LanguageModel
from kvjax.context import read
from kvjax.errors import UsageError
from kvjax.eval.harness.arguments import Settings
from kvjax.eval.harness.requests import Batch, Prompt, batches, halving
from kvjax.generation import answer
from kvjax.options import GenerationOptions
from kvjax.request import Request
from kvjax.scoring import score

_log = logging.getLogger("lm_eval.kvjax")
Result = TypeVar("Result")
#: Told of each result with its request's number, as soon as there is one.
Keep = Callable[[int, Result], None]


class Runner:
    """A model and what all requests share; ``max_length``: tokens of a prompt with what follows it."""

    def __init__(self, lm: LanguageModel, settings: Settings, max_length: int):
        self._lm, self._settings, self._max_length = lm, settings, max_length

    def score(self, prompts: Sequence[Prompt], keep: Keep[tuple[float, bool]]) -> list[tuple[float, bool]]:
        """The log-probability of each prompt's continuation, and whether greedy decoding gives it."""
        for prompt in prompts:
            if not 0 < len(prompt.continuation) <= self._max_length:
                raise UsageError(
                    f"A continuation has {len(prompt.continuation)} tokens; at least 1 and at most max_length, "
                    f"{self._max_length}, can be scored."
                )
        # The last token is scored and not read.
        fitting = self._shortened(prompts, lambda one: len(one.continuation) - 1)
        return self._run("loglikelihood", fitting, self._scores, keep)

    def generate(self, prompts: Sequence[Prompt], options: GenerationOptions, keep: Keep[str]) -> list[str]:
        """The answer to each prompt."""
        most = options.max_new_tokens
        if most >= self._max_length:
            raise UsageError(
                f"The task generates up to {most} tokens and max_length is {self._max_length}, which leaves none for "
                "the prompt; give max_gen_toks= in --gen_kwargs."
            )
        fitting = self._shortened(prompts, lambda _: most)
        return self._run("generate_until", fitting, lambda batch: self._answers(batch, options), keep)

    def _scores(self, batch: Batch) -> list[tuple[float, bool]]:
        settings, prompts = self._settings, batch.prompts
        rests: Any = [one.rest for one in prompts]
        how: dict[str, Any] = {"way": settings.way, "chat": False}
        if prompts[0].before:
            how["cache"] = self._read(batch)
        else:
            how |= {"policy": settings.policy, "storage": settings.storage}
            rests = rests[0] if batch.shared else rests
        found = score(self._lm, rests, [one.continuation for one in prompts], **how)
        return [(one.total, one.is_greedy) for one in found]

    def _answers(self, batch: Batch, options: GenerationOptions) -> list[str]:
        onto = self._read(batch) if batch.prompts[0].before else None
        # A row draws by its request's number, in whatever batch it comes.
        rests, numbers = [one.rest for one in batch.prompts], [one.number for one in batch.prompts]
        outputs = answer(Request(self._lm, rests, options, cache=onto, numbers=numbers))
        if any(output.finish_reason == "interrupted" for output in outputs):
            raise KeyboardInterrupt
        return [output.text for output in outputs]

    def _read(self, batch: Batch) -> Any:
        """The compressed cache of what stands before the questions: a row for each prompt, or one for all."""
        texts = [one.before for one in batch.prompts[: 1 if batch.shared else None]]
        return read(self._lm, texts, policy=self._settings.policy, storage=self._settings.storage, chat=False)

    def _shortened(self, prompts: Sequence[Prompt], following: Callable[[Prompt], int]) -> list[Prompt]:
        """Prompts that leave room for ``following`` tokens; those that are too long lose their beginning."""
        fitting = [one.shortened(self._max_length - following(one)) for one in prompts]
        cut = [(one, other) for one, other in zip(prompts, fitting, strict=True) if one != other]
        if any(one.before and not other.before for one, other in cut):
            raise UsageError(
                f"A prompt's question alone fills the {self._max_length} tokens of max_length, so nothing before "
                "question_separator is left to compress."
            )
        if cut:
            longest = max(one.tokens for one, _ in cut)
            _log.warning(
                "%d of %d prompts lose their beginning: the longest has %d tokens, and max_length is %d",
                *(len(cut), len(prompts), longest, self._max_length),
            )
        return fitting

    def _run(
        self, what: str, prompts: Sequence[Prompt], run: Callable[[Batch], list[Result]], keep: Keep[Result]
    ) -> list[Result]:
        """The result of each prompt, batch by batch."""
        found: dict[int, Result] = {}
        with progress.showing(), progress.stage("job", f"{what}:", unit="prompts", total=len(prompts), done=0) as shown:
            for batch in batches(prompts, self._settings.batch_size):
                for prompt, result in zip(batch.prompts, halving(run, batch), strict=True):
                    found[prompt.number] = result
                    keep(prompt.number, result)
                shown.update(len(found), len(prompts))
        return [found[prompt.number] for prompt in prompts]
