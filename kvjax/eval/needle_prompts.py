"""The ids of a needle sample's prompt, in the model's chat template if it has one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvjax.eval.ruler import Sample

if TYPE_CHECKING:
    from kvjax.checkpoints.load import LanguageModel


def template_tokens(lm: LanguageModel) -> int:
    """Tokens that a chat template adds around one message; without one those that begin a text."""
    if not lm.tokenizer.has_chat_template:
        return len(lm.tokenizer.prefix_ids)
    return len(lm.tokenizer.encode(lm.tokenizer.render([{"role": "user", "content": ""}])))


def prompt_ids(lm: LanguageModel, sample: Sample) -> tuple[list[int], list[int]]:
    """Ids of the context and of what comes after it, up to the beginning of the answer.

    Ids and not messages, because the benchmark's text must reach the model unchanged.
    """
    text, first = sample.prompt, lm.tokenizer.prefix_ids
    if lm.tokenizer.has_chat_template:
        user = {"role": "user", "content": sample.context + sample.question}
        text, first = lm.tokenizer.render([user]) + sample.answer_prefix.lstrip(), ()
    context, question, rest = text.rpartition(sample.question)
    return [*first, *lm.tokenizer.encode(context)], lm.tokenizer.encode_after(question + rest)
