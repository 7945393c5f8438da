"""A request checked against the model, the policy and the device, before anything is allocated."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from kvjax.allocation import Allocation
from kvjax.array_bytes import nbytes
from kvjax.cache.buckets import batch_bucket
from kvjax.cache.cache import OPEN_MESSAGE, Cache
from kvjax.cache.host_memory import device_bytes
from kvjax.cache.shared_context import SharedContext
from kvjax.checkpoints.load import LanguageModel, check_model
from kvjax.checks import whole_number
from kvjax.controls import controls_of, stops_of
from kvjax.device_memory import agreed_limit, device_limit
from kvjax.errors import UsageError, say_once
from kvjax.given_caches import GivenCaches
from kvjax.memory_needs import weights_bytes
from kvjax.options import DRAWN, FIELDS, GenerationOptions
from kvjax.ownership import Owned
from kvjax.planning import fitting
from kvjax.policies import Policy
from kvjax.policies.best import asked_later
from kvjax.policies.composition import shares
from kvjax.policies.fixed import fixed
from kvjax.policies.guard import check_value
from kvjax.policies.round_attention import SINKS
from kvjax.prompts import Tokens, as_list, prefix_tokens, read_tokens, tokenize
from kvjax.runtime.decode import CHUNK, Controls
from kvjax.runtime.programs import Programs

#: Tokens from which a prompt is held once for all of its samples. Copies of a shorter one are small, and sharing needs
#: two programs more.
SHARED_PROMPT = 1024
#: Policies whose notice was given: a conversation's lengths differ from turn to turn, and one sentence will do.
_notified: set[Policy] = set()


class Request:
    """Prompts tokenised and checked against the model, the policy and the device.

    Attributes:
      tokens: the context's and the prompts' ids as passed.
      prompts: ids to read, row by row before samples are spread: a continued row begins with its next token.
      given: the caches that they continue.
      cache: what they are read onto, a row per prompt, or None.
      cache_is_copy: whether its keys and values are the request's own, so that they may be consumed.
      owned: the conversation that ``cache`` is, where its owner passed it.
      policy: which tokens stay. storage: as what.
      choice: under ``best`` one line, the policy that it became and why; else None.
      n: samples of each prompt. rows: prompts times samples.
      shares_prompt: whether the samples of a single prompt, which is read onto nothing, share it.
      limits: tokens each prompt may generate, where that is not the options' number for all.
      numbers: what each prompt draws by, where that is not its place in the batch; a prompt of a long list so draws the
        same in whatever batch it comes.
      answers: of each row, the tokens that are scored in place of an answer; None where one is generated.
      prefix: under a policy that offloads rounds, of each first prompt the tokens that belong to no round.
      once: whether what is read becomes a context that its policy never chooses among again.
      size: the rows and tokens that the cache is allocated for; ``exact``: in a job's buckets and without spare rows.
      programs: what they run on.
    """

    def __init__(
        self,
        lm: LanguageModel,
        prompt: Any,
        options: GenerationOptions,
        *,
        n: int = 1,
        cache: Any = None,
        context: Any = None,
        limits: Sequence[int] | None = None,
        numbers: Sequence[int] | None = None,
        exact: bool = False,
        answers: Sequence[Sequence[int]] | None = None,
        read_only: bool = False,
        once: bool = False,
    ):
        check_model(lm)
        whole_number("n", n, 1)
        self.lm, self.options, self.memory_limit, self.n = lm, options, options.memory_limit, n
        self.limits, self.numbers, self.answers = limits, numbers, answers
        count = len(as_list(prompt)[0])
        # Nothing is joined or copied before everything was checked.
        self.owned = cache if isinstance(cache, Owned) else None
        given = self.given = GivenCaches.of(cache if self.owned is None else self.owned.value, count)
        next_token = given.next_token
        onto = {"onto": cache is not None, "open_messages": (next_token == OPEN_MESSAGE).tolist()}
        self.tokens: Tokens = (
            read_tokens(lm, prompt, options.chat)
            if read_only
            else tokenize(lm, prompt, context=context, chat=options.chat, **onto)
        )
        later = read_only or asked_later(
            context=context is not None, new_tokens=options.max_new_tokens, reserve_tokens=options.reserve_tokens
        )
        self.policy, self.choice = given.policy(options.policy, lm, later=later)
        check_value(self.policy)
        self.policy.check(lm.config)
        self.once = once and fixed(self.policy).chosen_once
        self.storage = given.storage(options.storage, lm.config.head_dim)
        given.check_model(lm.config)
        self.rows = count * n
        self.stop_ids = options.stop_ids(lm)
        self.prompts = self._with_next_token(next_token)
        if any(not ids for ids in self.prompts):
            raise UsageError("A prompt has no tokens; give at least one character.")
        context = given.common_context(lm)
        shared = given.shared_tokens(context) if shares(self.policy, self.storage) else 0
        alone = (
            count == 1 < n and not given.caches and not self.tokens.context and len(self.prompts[0]) >= SHARED_PROMPT
        )
        self.shares_prompt = alone and shares(self.policy, self.storage)
        self.size = self._checked_size(context, exact, shared)
        self.programs = Programs(lm.mesh, lm.config, exact=self.size.rows != batch_bucket(self.rows))
        self.cache = given.joined(lm, self.programs)
        self.cache_is_copy = self.cache is not None and given.are_apart(self.cache)
        rounds_begin = self.policy.offloads_rounds and self.cache is None
        self.prefix: tuple[int, ...] = self._prefix(prompt) if rounds_begin else ()

    @property
    def context(self) -> tuple[int, ...]:
        """Ids that come before every prompt."""
        return self.tokens.context

    def repeated_tokens(self, number: int) -> int:
        """Tokens that the policy has read beside those of a prompt and its context, in order to choose among them."""
        asked = self.policy.signals.repeat
        return 0 if asked is None else asked.tokens(len(self.context)) + asked.tokens(len(self.prompts[number]))

    @property
    def copies(self) -> list[int]:
        """The prompt of every row that is generated, rows of padding last."""
        own, every = [i // self.n for i in range(self.rows)], self.programs.rows(self.rows)
        # A row of padding is that of the prompts', where there is one, so that nothing is copied for it.
        return own + (list(range(self.rows, every)) if self.n == 1 else [0] * (every - self.rows))

    def _prefix(self, prompt: Any) -> tuple[int, ...]:
        """Tokens of each row's beginning that belong to no round: the system prompt, and the sinks at least."""
        prompts, context, chat = as_list(prompt)[0], self.tokens.context, self.options.chat
        firsts = [context] * len(prompts) if context else self.prompts
        found = [prefix_tokens(self.lm, p, ids) if chat else 0 for p, ids in zip(prompts, firsts, strict=True)]
        return tuple(min(max(count, SINKS), len(ids)) for count, ids in zip(found, firsts, strict=True))

    def _with_next_token(self, next_token: np.ndarray) -> list[tuple[int, ...]]:
        """Prompts of a continued cache begin with the token that was generated but not yet read."""
        result = []
        for token, ids, templated in zip(next_token.tolist(), self.tokens.prompts, self.tokens.templated, strict=True):
            # A chat template writes the end of the last answer itself.
            written = templated and (token in self.lm.stop_token_ids or ids[:1] == (token,))
            result.append(ids if token < 0 or written else (token, *ids))
        return result

    def _checked_size(self, held: SharedContext | None, exact: bool, shared: int) -> Allocation:
        """The allocation for the rows, which share their first ``shared`` tokens, or do already in ``held``."""
        config, limit, seen = self.lm.config, self.lm.config.max_position, self.given.seen
        added = np.array([len(self.tokens.context) + len(ids) for ids in self.prompts])
        if self.answers is not None:
            # The last token of an answer is scored and not read.
            lengths = np.array([len(ids) - 1 for ids in self.answers]).reshape(len(self.prompts), self.n)
            added = added + lengths.max(axis=1)
        longest = int((seen + added).max())
        if longest > limit and not (self.policy.beyond_context and int(added.max()) <= limit):
            before = f" after {int(seen.max())} of the conversation" if seen.any() else ""
            scored = "" if self.answers is None else " with its continuation"
            raise UsageError(
                f"The prompt has {int(added.max())} tokens{scored}{before}; this model's context is {limit}, so "
                "shorten it."
            )
        go_on = held is not None and all(
            cache.own_capacity for cache in self.given.layers
        )  # and have read something after it
        limit, mesh = self.memory_limit, self.lm.mesh
        if limit is None and mesh is not None and not exact:  # of one size there is nothing to choose
            limit = agreed_limit(mesh.jax.devices.ravel().tolist())
        # Read once, and shared by all rows where the policy allows it.
        context = len(self.tokens.context) + shared
        context += len(self.prompts[0]) if self.shares_prompt else 0
        size = fitting(
            config,
            self.policy,
            self.rows,
            longest - context,
            context=context,
            scored=self.options.prompt_logprobs,
            once=self.once,
            dtype=self.dtype,
            memory_limit=limit,
            already=self.given.bytes_with_copies(held, shared, 1 if mesh is None else mesh.size),
            storage=self.storage,
            mesh=mesh,
            # Samples of one prompt are read onto nothing later than it.
            reserve=0 if self.shares_prompt else self.options.reserve_tokens,
            # Rounds have sizes of their own, and so have rows that begin to share.
            held=None if self.policy.offloads_rounds or (shared and not go_on) else self.given.widest,
            held_context=None if held is None else device_bytes(jax.tree.leaves(held)),
            exact=exact,
        )
        self._notify((seen + added).tolist())  # last: until here the policy may be one that nothing can hash
        return size

    def _notify(self, totals: Sequence[int]) -> None:
        """Say, once, which options change nothing, and once of a policy what it cannot do for rows of these many
        tokens."""
        drawn = self.options.temperature == 0 and self.options.max_new_tokens and self.answers is None
        if drawn and (idle := self._idle_options()):
            change = "change" if len(idle) > 1 else "changes"
            say_once(f"At temperature 0, which is greedy decoding, {', '.join(idle)} {change} nothing.")
        if self.policy in _notified:
            return
        notices = (self.policy.notice(self.lm.config, total) for total in dict.fromkeys(totals))
        notice = next(filter(None, notices), None)
        if notice is not None:
            _notified.add(self.policy)
            say_once(notice)

    def _idle_options(self) -> list[str]:
        """Options that change nothing where no token is drawn, and were given."""
        given = [name for name in DRAWN if getattr(self.options, name) != FIELDS[name].default]
        return ["n", *given] if self.n > 1 else given

    def may_grow(self, cache: Cache, new_capacity: int) -> bool:
        """Whether a cache fits beside its larger successor, which exist together while it is copied."""
        if self.memory_limit is None and self.lm.mesh is not None and jax.process_count() > 1:
            return True  # hosts that have different memory would decide apart, and wait for each other
        limit = device_limit(self.memory_limit)
        larger = jax.eval_shape(
            lambda old: self.programs.grow(old, config=self.lm.config, new_capacity=new_capacity), cache
        )
        larger = larger.replace(context=None)  # what rows share is not copied
        caches = nbytes((cache, larger))
        devices = 1 if self.lm.mesh is None else self.lm.mesh.size
        weights = weights_bytes(self.lm.config, self.dtype, self.lm.mesh)
        return limit is None or weights + caches // devices <= limit

    @property
    def dtype(self) -> Any:
        """Dtype of the weights, and of the cache."""
        return self.lm.params.dtype

    @property
    def prompt_logprobs(self) -> bool:
        """Whether the log-probabilities of the prompts' own tokens were asked for."""
        return self.options.prompt_logprobs

    def forced(self, controls: Controls, start: int) -> Controls:
        """The controls of a chunk that begins with each row's answer's token ``start``, where answers are given."""
        if self.answers is None:
            return controls
        tokens = np.zeros((self.programs.rows(self.rows), CHUNK), np.int32)
        for row, ids in enumerate(self.answers):
            ahead = ids[start : start + CHUNK]
            tokens[row, : len(ahead)] = ahead
        return dataclasses.replace(controls, forced=jax.device_put(tokens))

    def controls(self) -> Controls:
        """The options on the device, for the compiled loop."""
        lm, options = self.lm, self.options
        # Rows of padding repeat the last.
        rows = np.minimum(np.arange(self.programs.rows(self.rows)), self.rows - 1)
        prompt, sample = np.divmod(rows, self.n)
        number = prompt if self.numbers is None else np.asarray(self.numbers)[prompt] % 2**31
        limits = [options.max_new_tokens] * (prompt[-1] + 1) if self.limits is None else self.limits
        limit = [min(limits[i], 2**31 - 1) for i in prompt]
        draws = np.stack([np.full(len(number), options.seed), number, sample], axis=1)
        stops = options.stop_strings, self.stop_ids
        if self.answers is not None:  # nothing but its end ends an answer that is given
            limit, stops = [len(self.answers[row]) for row in rows], ((), ())
        return controls_of(lm, [options] * len(rows), draws, limit, stops_of(lm, *stops, len(rows)))
