"""``HarnessModel``: the model ``kvjax`` of lm-evaluation-harness."""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from typing import Any, Literal

import jax
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from kvjax.cache.quantisation import Storage
from kvjax.checkpoints.load import LanguageModel, Weights, load
from kvjax.checks import true_or_false
from kvjax.errors import UsageError, quoted
from kvjax.eval.harness.arguments import Settings, checked, from_text, with_commas
from kvjax.eval.harness.generation_kwargs import options_of
from kvjax.eval.harness.requests import Ids, Prompt, question_start
from kvjax.eval.harness.runner import Runner
from kvjax.policies import Policy, format_policy
from kvjax.version import __version__

#: A prompt's text with its continuation, if it has one; its ids; the continuation's.
_Encoded = tuple[tuple[str, str] | None, list[int], list[int]]


@register_model("kvjax")
class HarnessModel(TemplateLM):
    """A model whose cache a policy compresses, asked by lm-evaluation-harness.

    The policy compresses a task's prompt before the continuation is scored or the answer is generated. The whole
    prompt, its question included, is in view of the compression, unless ``question_separator`` divides it.

    Args:
      name: a model as :func:`kvjax.load` takes it, or one from there.
      policy: which tokens stay, a policy or its text form; semicolons may stand for its commas.
      storage: as what the cache is stored, "model" or "int8".
      weights, dtype, mesh, compile_cache: as for :func:`kvjax.load`; semicolons may stand for a mesh's comma.
      batch_size: rows at a time; a batch that does not fit is halved. With several, the choices of a question, and
        questions about the same text, share what is read once.
      max_length: tokens of a prompt with its continuation, by default the model's context; longer prompts lose their
        beginning.
      way: how continuations are scored: "prefill" reads them as one chunk, "decode" token by token, so that the policy
        also evicts while they grow; see :func:`kvjax.score`.
      question_separator: text at whose last occurrence a prompt is divided: what stands before it is compressed before
        the rest is read, so that the compression does not see the question.
      seed: of samples, where a task draws them.
      device, max_batch_size: the harness passes them on; ignored. JAX chooses the device.
    """

    backend = "causal"

    def __init__(
        self,
        name: str | LanguageModel,
        policy: Policy | str = "full",
        storage: Storage | str | None = None,
        weights: Weights | None = None,
        dtype: str | None = None,
        mesh: str | None = None,
        batch_size: int = 1,
        max_length: int | None = None,
        way: Literal["prefill", "decode"] = "prefill",
        question_separator: str | None = None,
        seed: int = 0,
        compile_cache: bool = True,
        device: str | None = None,
        max_batch_size: int | None = None,
    ):
        super().__init__()
        self.settings = Settings.of(
            policy=policy, storage=storage, way=way, batch_size=batch_size, max_length=max_length,
            question_separator=question_separator, seed=seed,
        )  # fmt: skip
        true_or_false("compile_cache", compile_cache)
        if isinstance(name, LanguageModel):
            self.language_model = name
        else:
            more: dict[str, Any] = {"dtype": dtype, "weights": weights, "mesh": with_commas(mesh)}
            self.language_model = load(str(name), compile_cache=compile_cache, **more)
        most = self.language_model.config.max_position
        if (self.settings.max_length or 0) > most:
            raise UsageError(f"max_length is {max_length}; this model's context is {most}, so give at most that.")
        self.max_length: int = self.settings.max_length or most
        self._runner = Runner(self.language_model, self.settings, self.max_length)

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> HarnessModel:
        """The model of the arguments' text: NAME=VALUE,NAME=VALUE, or a JSON object."""
        return cls.create_from_arg_obj(from_text(arg_string), additional_config)

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None
    ) -> HarnessModel:
        """The model of arguments by name; they win over what the harness adds to them."""
        accepted = {name: one for name, one in inspect.signature(cls).parameters.items() if name != "self"}
        return cls(**checked(arg_dict, additional_config or {}, accepted))

    def get_model_info(self) -> dict[str, Any]:
        """Facts for the results: what was measured."""
        settings, lm = self.settings, self.language_model
        return {
            "kvjax_version": __version__,
            "model_name": lm.name,
            "model_dtype": lm.params.number_format,
            "policy": format_policy(settings.policy),
            "storage": "model" if settings.storage is None else settings.storage.kind,
            "way": settings.way,
            "question_separator": settings.question_separator,
            "max_length": self.max_length,
            "jax_backend": jax.default_backend(),
        }

    # --- text and tokens ----------------------------------------------------------------------------------------

    @property
    def eot_token_id(self) -> int:
        """The id that ends a text."""
        return self._special("eos_token")

    @property
    def prefix_token_id(self) -> int:
        """The id that stands before an empty context: the beginning of a text, or else its end."""
        return self._special("bos_token", "eos_token")

    def _special(self, *roles: str) -> int:
        lm = self.language_model
        texts = (lm.tokenizer.special_tokens.get(role) for role in roles)
        found = [token for text in texts if text for token in lm.tokenizer.encode(text)[:1]]
        found += lm.stop_token_ids
        if not found:
            raise UsageError(f"{lm.name} has no token that begins or ends a text, which an empty context needs.")
        return found[0]

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Ids of a text, with those that the model expects in front unless the text itself begins with them."""
        tokenizer = self.language_model.tokenizer
        prefix = list(tokenizer.prefix_ids)
        if add_special_tokens is None:
            add_special_tokens = not string.startswith(tokenizer.decode(prefix, skip_special_tokens=False) or "\0")
        return (prefix if add_special_tokens else []) + tokenizer.encode(string)

    @property
    def tokenizer_name(self) -> str:
        """The model's name, for the harness's own cache of requests."""
        return self.language_model.name.replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The model's chat template, or None where none is asked for."""
        if isinstance(chat_template, str):
            raise UsageError(
                f"kvjax knows a model's default chat template alone, and not {quoted(chat_template)}; give "
                "--apply_chat_template without a name."
            )
        return self.language_model.tokenizer.chat_template if chat_template else None

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The messages as the model's template writes them; without a generation prompt the last one is left open."""
        messages, begun = list(chat_history), ""
        if not add_generation_prompt and messages and messages[-1]["role"] == "assistant":
            begun = messages.pop()["content"]
        return self.language_model.tokenizer.render(messages) + begun

    # --- requests -----------------------------------------------------------------------------------------------

    def _loglikelihood_tokens(
        self, requests: Sequence[_Encoded], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """The log-probability of each continuation after its prompt, and whether greedy decoding gives it."""
        prompts = [
            Prompt(number, *self._divided(None if text is None else text[0], context), tuple(continuation))
            for number, (text, context, continuation) in enumerate(requests)
        ]

        def keep(number: int, found: tuple[float, bool]) -> None:
            if (text := requests[number][0]) is not None:
                self.cache_hook.add_partial("loglikelihood", text, found)

        return self._runner.score(prompts, keep)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """The log-probability of each whole text, in windows that the harness makes; no text has a question."""
        windows = [
            (number, make_disjoint_window(window))
            for number, request in enumerate(requests)
            for window in get_rolling_token_windows(
                self.tok_encode(request.args[0]), self.prefix_token_id, self.max_length, 1
            )
        ]
        totals = [0.0] * len(requests)
        scored = self._loglikelihood_tokens([(None, *window) for _, window in windows]) if windows else []
        for (number, _), (logprob, _) in zip(windows, scored, strict=True):
            totals[number] += logprob
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """The answer to each prompt, without the stop string that ended it."""
        arguments: list[Any] = [request.args for request in requests]
        kinds: dict[str, list[int]] = {}
        for number, (_, kwargs) in enumerate(arguments):
            kinds.setdefault(json.dumps(kwargs, sort_keys=True, default=str), []).append(number)

        def keep(number: int, found: str) -> None:
            self.cache_hook.add_partial("generate_until", arguments[number], found)

        texts: dict[int, str] = {}
        for numbers in kinds.values():
            prompts = []
            for number in numbers:
                text = arguments[number][0]
                ids = self.tok_encode(text) or [self.prefix_token_id]
                prompts.append(Prompt(number, *self._divided(text, ids)))
            options = options_of(arguments[numbers[0]][1], self.language_model, self.settings)
            texts |= zip(numbers, self._runner.generate(prompts, options, keep), strict=True)
        return [texts[number] for number in range(len(requests))]

    def _divided(self, text: str | None, ids: Sequence[int]) -> tuple[Ids, Ids]:
        """The ids of a prompt before and after its question, where that is asked for; a window has no text."""
        separator = self.settings.question_separator
        start = 0 if separator is None or text is None else question_start(self.tok_encode, text, ids, separator)
        return tuple(ids[:start]), tuple(ids[start:])
