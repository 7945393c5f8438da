"""The options of a generation: the default, check and help of each are written here and nowhere else.

``generate``, ``stream_generate``, ``Chat``, ``batch.run``, ``Engine.submit``, ``read`` and ``score`` take them as one
value, as keywords, or both; the command line makes its flags of them. A new one is a field and a line of
:class:`AnswerKeywords`; what obeys it is in ``kvjax/runtime/sampling.py``.
"""
# ruff: noqa: RUF009  the call in a field's default returns the field itself

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

from kvjax.checks import MOST_BYTES, MOST_SEED, is_unicode, number, optional, true_or_false, whole_number
from kvjax.errors import UsageError, did_you_mean, quoted
from kvjax.progress import Progress
from kvjax.progress import check as check_progress

if TYPE_CHECKING:
    from kvjax.cache.quantisation import Storage
    from kvjax.checkpoints.load import LanguageModel
    from kvjax.policies import Policy

Function = TypeVar("Function", bound=Callable[..., Any])


def _option(
    default: Any,
    help: str,
    check: Callable[[str, Any], None],
    details: str = "",
    *,
    compared: bool = True,
    drawn: bool = False,
) -> Any:
    """A field of :class:`GenerationOptions`.

    Args:
      help: one sentence, for the flag and the docstrings. details: more, for the docstrings alone.
      check: called with the field's name and its value; raises UsageError for one that makes no sense.
      compared: whether options that differ in it are different options.
      drawn: whether it changes nothing where tokens are not drawn, at temperature 0.
    """
    about = {"help": help, "check": check, "details": details, "drawn": drawn}
    return dataclasses.field(default=default, compare=compared, metadata=about)


def _policy(name: str, value: Any) -> None:
    from kvjax.policies import parse

    if value is not None:
        parse(value)


def _storage(name: str, value: Any) -> None:
    from kvjax.cache.quantisation import parse_storage

    parse_storage(value)


def _stop(name: str, value: Any) -> None:
    if not isinstance(value, (str, list, tuple, type(None))):
        raise UsageError(f"{name} is {quoted(value)}; give a string or a list of strings.")
    texts = as_strings(value)
    if any(not isinstance(text, str) or not text or not is_unicode(text) for text in texts):
        raise UsageError("A stop string is empty or not text; give strings of at least one character.")
    from kvjax.runtime.stopping import check_stop_strings

    check_stop_strings(texts)


def _stop_token_ids(name: str, value: Any) -> None:
    if isinstance(value, (str, bytes)) or (
        not isinstance(value, (Sequence, type(None))) and not getattr(value, "ndim", 0)
    ):
        raise UsageError(f"{name} is {quoted(value)}; give a list of token ids.")


def as_strings(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """Stop strings as a tuple, however they were given."""
    return (stop,) if isinstance(stop, str) else tuple(stop or ())


@dataclasses.dataclass(frozen=True)
class GenerationOptions:
    """Options of generation: which tokens the cache keeps, how tokens are sampled, and when to stop.

    A value that makes no sense is refused when the options are made (UsageError, one sentence).
    """

    policy: Policy | str | None = _option(
        None,
        "Which tokens the cache keeps, such as lagkv:ratio=0.25,sink=16; see `kvjax policies`.",
        _policy,
        "A policy or its text form; None keeps all of them, or goes on with the policy of the continued cache.",
    )
    storage: Storage | str | None = _option(
        None,
        "How the cache's keys and values are stored: model (floats of --dtype) or int8.",
        _storage,
        'Or a kvjax.Storage; None is "model", or the storage of the continued cache.',
    )
    chat: bool = _option(
        True,
        "Whether the prompt goes through the chat template.",
        true_or_false,
        "Token ids are always taken as they are.",
    )
    max_new_tokens: int = _option(
        256,
        "Generate at most this many tokens; `generate` with 0 only reads the prompt.",
        partial(whole_number, least=0),
    )
    temperature: float = _option(0.0, "Sampling temperature; 0 is greedy decoding.", partial(number, least=0))
    top_k: int | None = _option(
        None, "Sample from the k most likely tokens.", optional(partial(whole_number, least=1)), drawn=True
    )
    top_p: float = _option(
        1.0,
        "Sample from the smallest set of tokens with this total probability.",
        partial(number, least=0, most=1, open_below=True),
        drawn=True,
    )
    min_p: float = _option(
        0.0,
        "Drop tokens less likely than this fraction of the most likely token's probability.",
        partial(number, least=0, most=1),
        drawn=True,
    )
    repetition_penalty: float = _option(
        1.0,
        "Above 1 makes seen tokens less likely.",
        partial(number, least=0, open_below=True),
        "Those of the context, the prompt and the answer; a continued cache does not remember what it has read.",
    )
    seed: int = _option(
        0,
        "Seed of the random numbers.",
        partial(whole_number, least=0, most=MOST_SEED),
        "Sample j of prompt i in a batch depends on (seed, i, j) alone, not on the rest of the batch; below 2**32.",
    )
    stop: str | Sequence[str] | None = _option(
        (), "Stop before this text.", _stop, "A string or several; none of them is part of the text."
    )
    stop_token_ids: Sequence[int] | None = _option(
        None, "Token ids that end the text, besides the model's own.", _stop_token_ids
    )
    logprobs: bool = _option(False, "Also return the log-probability of every token.", true_or_false)
    prompt_logprobs: bool = _option(
        False,
        "Also return the log-probability of every token of the prompt.",
        true_or_false,
        "They come from prefill, and cost one more product with the output head for each token.",
    )
    memory_limit: int | None = _option(
        None,
        "Refuse to allocate more bytes than this, by default what the device has.",
        optional(partial(whole_number, least=1, most=MOST_BYTES)),
        "A request that does not fit is refused before allocation; an answer whose cache would outgrow it ends early, "
        'with finish_reason "memory".',
    )
    reserve_tokens: int | None = _option(
        None,
        "Reserve slots for this many tokens of later turns, over all rows together.",
        optional(partial(whole_number, least=0, most=2**31 - 1)),
        "Until they are used up no later turn compiles; then the cache grows by half, and by these at least. "
        "None reserves none for a first call, and 4,096 for Chat and for a call that continues a cache; fewer are "
        "reserved where they do not fit, and none for samples (n) that share a prompt of 1,024 tokens or more.",
    )
    progress: Progress = _option(
        None,
        "Whether to show progress on standard error.",
        check_progress,
        "None draws a line on a terminal and in a notebook, and nothing elsewhere; True also prints a line every ten "
        "seconds elsewhere; False shows nothing; a function is called with each kvjax.progress.Event.",
        compared=False,
    )

    def __post_init__(self) -> None:
        for option in fields(self):
            value = getattr(self, option.name)
            option.metadata["check"](option.name, value)
            if getattr(value, "ndim", None) == 0:  # Python's own number is written as JSON, and multiplies lists
                object.__setattr__(self, option.name, value.item())

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """``stop`` as a tuple."""
        return as_strings(self.stop)

    def stop_ids(self, lm: LanguageModel) -> tuple[int, ...]:
        """The model's end-of-text ids, those asked for, and those of special tokens among ``stop``.

        UsageError for an id that is not the model's, and for a special token within a longer stop string: it adds no
        text, so the string would never be found.
        """
        added: Any = () if self.stop_token_ids is None else self.stop_token_ids
        ids = [*lm.stop_token_ids, *(added.tolist() if hasattr(added, "tolist") else added)]
        for string in self.stop_strings:
            token, alone = lm.tokenizer.special_in(string)
            if token is not None and not alone:
                raise UsageError(
                    f"stop holds {quoted(string)} with the special token {token}, which adds no text to an answer; "
                    "give the token alone, and other strings beside it."
                )
            if token is not None:
                ids.append(lm.tokenizer.id_of(token))
        most = lm.config.vocab_size - 1
        for token in ids:
            try:
                whole_number("token", token, 0, most)
            except UsageError:
                raise UsageError(f"The stop token id {quoted(token)} is not one of this model's 0 to {most}.") from None
        return tuple(int(token) for token in ids)


# The fields as keywords, for type checkers, by what takes them.


class AnswerKeywords(TypedDict, total=False):
    """How one prompt is answered."""

    max_new_tokens: int
    temperature: float
    top_k: int | None
    top_p: float
    min_p: float
    repetition_penalty: float
    seed: int
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    logprobs: bool
    prompt_logprobs: bool


class CacheKeywords(TypedDict, total=False):
    """How a cache is made."""

    policy: Policy | str | None
    storage: Storage | str | None
    memory_limit: int | None
    progress: Progress


class RequestKeywords(AnswerKeywords, total=False):
    """The keywords of ``Engine.submit``, whose engine has the cache."""

    chat: bool


class ReadKeywords(CacheKeywords, total=False):
    """The keywords of ``read`` and ``score``, which generate nothing."""

    chat: bool


class JobKeywords(AnswerKeywords, CacheKeywords, total=False):
    """The keywords of ``batch.run``, whose rows have no later turns."""

    chat: bool


class ChatKeywords(AnswerKeywords, CacheKeywords, total=False):
    """The keywords of ``Chat``, whose prompts are messages."""

    reserve_tokens: int | None


class GenerationKeywords(ChatKeywords, total=False):
    """All of them, the keywords of ``generate``."""

    chat: bool


FIELDS: dict[str, dataclasses.Field[Any]] = {option.name: option for option in fields(GenerationOptions)}
#: Those that change nothing at temperature 0.
DRAWN = tuple(name for name, option in FIELDS.items() if option.metadata["drawn"])
#: Those that what only reads has no use for.
OF_ANSWERS = tuple(name for name in FIELDS if name not in ("policy", "storage", "chat", "memory_limit", "progress"))


def merged(
    caller: str,
    options: GenerationOptions | None,
    keywords: Mapping[str, Any],
    *,
    also: Collection[str] = (),
    without: Collection[str] = (),
) -> GenerationOptions:
    """``options``, or the defaults, with the keywords in place of its fields.

    Args:
      caller: what takes them, as the sentence names it.
      also: other keywords it takes, for the sentence. without: fields that it does not take.

    Raises:
      UsageError: an unknown keyword, or a value that makes no sense.
    """
    if not isinstance(options, (GenerationOptions, type(None))):
        raise UsageError(
            f"options is {quoted(options)}; give a kvjax.GenerationOptions, and anything else by its keyword."
        )
    accepted = [*(name for name in FIELDS if name not in without), *also]
    for name in keywords:
        if name not in accepted:
            near = did_you_mean(name, accepted)
            raise UsageError(f"{caller} takes no {quoted(name)};{near} it takes {', '.join(sorted(accepted))}.")
    return dataclasses.replace(GenerationOptions() if options is None else options, **keywords)


def merged_for_reading(
    caller: str, options: GenerationOptions | None, keywords: Mapping[str, Any], *, also: Collection[str]
) -> GenerationOptions:
    """:func:`merged` for what generates nothing: the fields of ``options`` that say how to answer do not count."""
    found = merged(caller, options, keywords, also=also, without=OF_ANSWERS)
    return dataclasses.replace(found, **{name: FIELDS[name].default for name in OF_ANSWERS})


def shows_options(without: Collection[str] = ()) -> Callable[[Function], Function]:
    """Decorator: ``help`` shows every option, with its default, where a function takes them as ``**keywords``."""

    def show(function: Function) -> Function:
        signature = inspect.signature(function)
        taken = [option for name, option in FIELDS.items() if name not in without]
        keyword = inspect.Parameter.KEYWORD_ONLY
        shown = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        shown += [inspect.Parameter(f.name, keyword, default=f.default, annotation=f.type) for f in taken]
        setattr(function, "__signature__", signature.replace(parameters=shown))  # noqa: B010  no checker knows the name
        if function.__doc__:
            text = re.sub(r"(?ms)^( *)keywords: .*?$", rf"\g<0>\n{_described(taken)}", function.__doc__, count=1)
            function.__doc__ = text
        return function

    return show


def _described(options: Collection[dataclasses.Field[Any]]) -> str:
    """A docstring's lines about options."""
    about = [f"{f.name}: {f.metadata['help']} {f.metadata['details']}".rstrip() for f in options]
    return "\n".join(f"      {line}" for line in about)


if GenerationOptions.__doc__:
    GenerationOptions.__doc__ += f"\n    Attributes:\n{_described(FIELDS.values())}\n    "
