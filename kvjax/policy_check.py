"""``check_policy``: the properties that every policy has, tried on one, for its author."""

from __future__ import annotations

import dataclasses
import inspect
import traceback
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from kvjax.checkpoints.load import LanguageModel, check_model
from kvjax.checks import MOST_SEED, whole_number
from kvjax.errors import KvjaxError, UsageError, cut, quoted
from kvjax.generation import generate
from kvjax.output import Output
from kvjax.planning import plan
from kvjax.policies import Full, Policy, RazorAttention
from kvjax.policies.best import resolve
from kvjax.sharding.mesh import Mesh

#: Tokens that every prompt's answer is made of, and those of a second turn's prompt.
_ANSWER, _LATER = 6, 20


@dataclasses.dataclass(frozen=True)
class PolicyCheck:
    """The findings about a policy.

    Attributes:
      holds: properties that hold, by name, with what each says.
      skipped: properties that could not be tried, by name, with the reason.
    """

    holds: dict[str, str]
    skipped: dict[str, str]

    def __str__(self) -> str:
        lines = [f"{name}: {says}" for name, says in self.holds.items()]
        return "\n".join([*lines, *(f"{name}: not tried, {reason}" for name, reason in self.skipped.items())])


class _NotTried(Exception):
    """A property that this policy, model or machine cannot have; the message is the reason."""


def check_policy(policy: Policy, lm: LanguageModel, *, seed: int = 0) -> PolicyCheck:
    """Try the properties that every policy must have on one of your own; it takes a dozen short generations.

    A small model in float32 does; what is wrong with a policy is wrong with it under any model.

    Args:
      policy: one with options under which prompts of a hundred tokens lose some.
      lm: the model, on one device. seed: of the prompts, which are random tokens.

    Returns:
      What holds, and what could not be tried: on a machine of one device, that a mesh gives the same.

    Raises:
      UsageError: a property that does not hold, naming the method; also all that ``generate`` refuses.
    """
    check_model(lm)
    whole_number("seed", seed, 0, MOST_SEED)
    if not isinstance(policy, Policy):
        raise UsageError(f"{quoted(policy)} is not a policy; give an instance of a class that derives from Policy.")
    policy = resolve(policy, lm.config, later=False).policy
    if policy.offloads_rounds:
        raise UsageError(f"{type(policy).__name__} moves rounds of conversations; policies of tokens are checked.")
    return _Checking(policy, lm, seed).run()


class _Checking:
    """One policy's check."""

    def __init__(self, policy: Policy, lm: LanguageModel, seed: int):
        self._policy, self._lm, self._name = policy, lm, type(policy).__name__
        most = lm.config.max_position - 2 * (_ANSWER + _LATER)
        if most < 8:
            raise UsageError(f"The model's context of {lm.config.max_position} tokens is too short to check a policy.")
        # The first two share a bucket, so that their programs are shared; the third is shorter than most windows.
        lengths = [min(length, most) for length in (150, 131, 5)]
        draw, special = np.random.default_rng(seed), {*lm.tokenizer.special_ids, *lm.stop_token_ids}
        words = [i for i in range(lm.tokenizer.vocab_size) if i not in special] or [0]
        self._prompts = [draw.choice(words, length).tolist() for length in lengths]
        self._later = draw.choice(words, _LATER).tolist()

    def run(self) -> PolicyCheck:
        tried: dict[str, tuple[str, Callable[[], None]]] = {
            "plan": ("slots and budgets are what is allocated and kept", self._plan),
            "full": ("where it keeps every token, it answers as the full cache", self._full),
            "row alone": ("a row of a batch is the row alone", self._row_alone),
            "later turn": ("a conversation goes on, alone and in a batch alike", self._later_turn),
            "int8": ("rows stored as int8 are chosen alike in a batch and alone", self._int8),
            "composition": ("it may have some of a layer's KV heads, under RazorAttention", self._composition),
            "mesh": ("devices of a mesh give what one gives", self._mesh),
        }
        holds, skipped = {}, {}
        for name, (says, check) in tried.items():
            try:
                check()
                holds[name] = says
            except _NotTried as reason:
                skipped[name] = str(reason)
            except KvjaxError:
                raise
            except Exception as error:
                # The author's code, and what it gives, fail in any way that code can; the cause stays attached.
                raise UsageError(self._failure(error)) from error
        return PolicyCheck(holds, skipped)

    def _failure(self, error: Exception) -> str:
        """The failure of a method of the policy, or of what it gave, as a sentence."""
        own = {
            method.__code__: name
            for cls in type(self._policy).__mro__
            for name, method in vars(cls).items()
            if inspect.isfunction(method) and not cls.__module__.startswith("kvjax.")
        }
        frames = [own[frame.f_code] for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code in own]
        said = " ".join(str(error).split()).rstrip(".") or "nothing more"
        what = f"{type(error).__name__}: {cut(said)}"
        return f"{self._name}.{frames[-1]} raises {what}." if frames else f"{self._name} gives what cannot run: {what}."

    def _ask(self, prompts: Any, policy: Policy | None = None, lm: LanguageModel | None = None, **options: Any) -> Any:
        given: dict[str, Any] = {"max_new_tokens": _ANSWER, "seed": 0} | options
        if "cache" not in given:
            given["policy"] = policy or self._policy
        return generate(lm or self._lm, prompts, **given)

    def _same(self, what: str, one: Output, other: Output) -> None:
        """Refuse two outputs that differ in what they kept or, in float32, in their tokens."""
        if one.stats.retained != other.stats.retained:
            heads = [(i, *pair) for i, pair in enumerate(zip(one.stats.retained, other.stats.retained, strict=True))]
            layer, first, second = next(each for each in heads if each[1] != each[2])
            kept = f"layer {layer} keeps {list(first)} tokens a head, and {list(second)}"
            raise UsageError(f"{self._name}: {what}; {kept}.")
        if self._lm.params.dtype == np.float32 and one.tokens != other.tokens:
            answers = f"answers {one.tokens}, and {other.tokens}"
            raise UsageError(f"{self._name}: {what}; it keeps as many tokens and {answers}.")

    def _alone(self, count: int, **options: Any) -> None:
        """Ask the first prompts together; the later of them must be answered as they are alone."""
        together = self._ask(self._prompts[:count], **options)
        for prompt, output in list(zip(self._prompts, together, strict=False))[1:]:
            self._same("a row of a batch is not the row alone", output, self._ask(prompt, **options))

    def _plan(self) -> None:
        policy, config = self._policy, self._lm.config
        for prompt in self._prompts:
            output = self._ask(prompt, max_new_tokens=0)
            planned = plan(self._lm, prompt_tokens=len(prompt), max_new_tokens=0, policy=policy)
            if planned.cache_bytes != output.cache.nbytes:
                raise UsageError(
                    f"{self._name}.capacities: {planned.cache_bytes:,} bytes are planned for {len(prompt)} tokens and "
                    f"{output.cache.nbytes:,} are there; give the same for the same arguments."
                )
            if type(policy).budgets is Policy.budgets or policy.shares_layers:
                continue
            total = np.asarray([len(prompt)], np.int32)
            for layer, kept in enumerate(output.stats.retained):
                said = np.asarray(policy.budgets(config, layer, total))[0].tolist()
                sharing = [head for head, owner in enumerate(policy.owners(config, layer)) if owner.shares_slots]
                # Of heads that share their slots it is what an equal one has.
                alike = said if sum(kept[head] - said[head] for head in sharing) == 0 else list(kept)
                kept = [alike[head] if head in sharing else count for head, count in enumerate(kept)]
                if said != kept:
                    raise UsageError(
                        f"{self._name}.budgets keeps {said[0]} of {len(prompt)} tokens in layer {layer}, head 0, and "
                        f"{kept[0]} are kept; let it say what select does."
                        if said[0] != kept[0]
                        else f"{self._name}.budgets says {said} in layer {layer}, and {kept} are kept."
                    )

    def _full(self) -> None:
        """A prompt of which nothing was dropped, and nothing will be with the first token that is appended."""
        prompt, policy = self._prompts[-1], self._policy
        one = self._ask(prompt, logprobs=True)
        if not np.isfinite(one.logprobs).all():
            raise UsageError(f"{self._name}: its answer's log-probabilities are not finite; look at what it gives.")
        whole = np.asarray([len(prompt) + 1], np.int32)
        said = [policy.budgets(self._lm.config, layer, whole) for layer in range(self._lm.config.num_layers)]
        if type(policy).budgets is Policy.budgets or min(int(np.min(kept)) for kept in said) <= len(prompt):
            raise _NotTried("its budgets do not say that it keeps the shortest prompt and a token more")
        if policy.merges or self._lm.params.dtype != np.float32:
            raise _NotTried("its slots stand for several tokens, or the weights are not float32")
        full = self._ask(prompt, Full(), logprobs=True)
        if one.tokens[:2] != full.tokens[:2] or not np.allclose(one.logprobs[:2], full.logprobs[:2], atol=1e-3):
            raise UsageError(
                f"{self._name}: it keeps {len(prompt)} tokens and the first of its answer, and answers "
                f"{one.tokens[:2]} where the full cache answers {full.tokens[:2]}; look at append, and at the values "
                "that select gives."
            )

    def _row_alone(self) -> None:
        self._alone(len(self._prompts))
        first, again = self._ask(self._prompts), self._ask(self._prompts)
        for one, other in zip(first, again, strict=True):
            self._same("the same prompts give another answer", one, other)

    def _later_turn(self) -> None:
        together = self._ask(self._prompts[:2])
        later = self._ask([self._later] * 2, cache=[output.cache for output in together])
        alone = self._ask(self._later, cache=together[1].cache)
        self._same("a later turn's row is not the row alone", later[1], alone)
        # A token that ends the second row's answer alone: the first goes on beside it.
        ends = next((token for token in together[1].tokens[:-1] if token not in together[0].tokens), None)
        if ends is None:
            return
        ended = (
            self._ask(self._prompts[:2], stop_token_ids=[ends])[1],
            self._ask(self._prompts[1], stop_token_ids=[ends]),
        )
        one, other = (self._ask(self._later, cache=output.cache) for output in ended)
        self._same("a row that has ended changes while another goes on; look at step.active", one, other)

    def _int8(self) -> None:
        self._alone(2, storage="int8")

    def _composition(self) -> None:
        config = self._lm.config
        if config.num_kv_heads < 2:
            raise _NotTried("the model has one KV head a layer")
        if config.positional != "rope":
            raise _NotTried("an ALiBi model's heads have no inner policy")
        try:
            composed = RazorAttention(inner=self._policy, heads=((0, 0),))
            composed.check(config)
        except UsageError as error:
            raise _NotTried(str(error)) from error
        self._alone(2, policy=composed)

    def _mesh(self) -> None:
        devices = jax.devices()
        if self._lm.mesh is not None or len(devices) < 2:
            raise _NotTried("there is one device" if self._lm.mesh is None else "the model is on a mesh")
        single = self._ask(self._prompts[:2])
        for mesh in (Mesh(2, 1), Mesh(1, 2)):
            spread = self._ask(self._prompts[:2], lm=self._lm.on(mesh))
            for one, other in zip(single, spread, strict=True):
                self._same(f"the mesh {mesh} gives another answer", other, one)
