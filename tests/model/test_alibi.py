"""ALiBi models under compression: every query against exactly the tokens its policy kept, at their own positions."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys
from support import bloom_oracle, tiny

import kvjax
from kvjax.cache.pool import mark_by_head
from kvjax.checkpoints.load import load
from kvjax.policies import Full, StreamingLLM, parse
from kvjax.runtime.decode import forward_step
from kvjax.runtime.prefill import logits_of
from kvjax.runtime.prefill_batches import read_prompts

CASE = next(case for case in tiny.CASES if case.name == "bloom_3_heads")
LAYERS, HEADS = 2, 3
TOLERANCE = 2e-5  # logits have a standard deviation of about 1


@pytest.fixture(scope="module")
def lm(tmp_path_factory):
    return load(tiny.write_folder(CASE, tmp_path_factory.mktemp("bloom") / "m"), dtype="float32", progress=False)


@functools.partial(jax.jit, static_argnames=("config", "policy"))
def _step(params, cache, token, *, config, policy):
    if policy.maintains:

        def one(layers):
            row = jnp.argmax(policy.due(layers, config))
            return tuple(policy.maintain(i, layer, config, row, cache.seen[row]) for i, layer in enumerate(layers))

        layers = jax.lax.while_loop(lambda layers: policy.due(layers, config).any(), one, cache.layers)
        cache = cache.replace(layers=layers)
    return forward_step(params, cache, token, jnp.ones(token.shape, bool))


def kept(cache, row: int) -> list[list[list[int]]]:
    """Positions in the valid slots of each layer and head, in slot order."""
    found = []
    for layer in cache.layers:
        positions, length = np.asarray(mark_by_head(layer, "position"))[row], np.asarray(layer.length)[row]
        found.append([positions[head, :count].tolist() for head, count in enumerate(length)])
    return found


def with_sorted_slots(cache, policy, config):
    """The cache as a later turn's queries find it: without slots whose token has left."""
    layers = tuple(policy.sort_slots(i, layer, config) for i, layer in enumerate(cache.layers))
    return cache.replace(layers=layers)


@dataclasses.dataclass
class Row:
    """What one row was fed, what each of its queries saw beside the new tokens, and the logits of some queries."""

    tokens: list[int]
    hidden: np.ndarray
    logits: dict[int, np.ndarray]

    def sees(self, query: int, positions: list[list[list[int]]], new_from: int) -> None:
        """Query ``query`` sees these positions and the tokens from ``new_from`` on."""
        self.hidden[:, :, query, :new_from] = True
        for layer, heads in enumerate(positions):
            for head, ones in enumerate(heads):
                self.hidden[layer, head, query, ones] = False

    def check(self, places: np.ndarray | None = None) -> None:
        """The logits are those of dense attention over what was seen, keys at ``places`` [query, key]."""
        count, tensors = len(self.tokens), tiny.weights(CASE)
        hidden = self.hidden[:, :, :count, :count]
        want = bloom_oracle.logits(tensors, np.array(self.tokens), LAYERS, HEADS, hidden_from=hidden, positions=places)
        for query, logits in self.logits.items():
            np.testing.assert_allclose(logits, want[query], atol=TOLERANCE, err_msg=f"query {query}")


def converse(lm, policy, turns: list[tuple[list[int], int]]) -> tuple[list[Row], kvjax.Cache]:
    """Feed every turn's prompts (tokens of each row) and then tokens one by one, all random."""
    random = np.random.default_rng(0)
    batch, most = len(turns[0][0]), 256
    rows = [Row([], np.zeros((LAYERS, HEADS, most, most), bool), {}) for _ in range(batch)]
    cache = None
    for lengths, steps in turns:
        prompts = [random.integers(0, tiny.VOCAB, size).tolist() for size in lengths]
        before = None if cache is None else with_sorted_slots(cache, policy, lm.config)
        for i, row in enumerate(rows):
            start = len(row.tokens)
            row.tokens += prompts[i]
            if before is not None:
                held = kept(before, i)
                for query in range(start, len(row.tokens)):
                    row.sees(query, held, start)
        cache, logits = read_prompts(lm.params, prompts, policy=policy, cache=cache, consume=False, dtype=jnp.float32)
        for i, row in enumerate(rows):
            if prompts[i]:
                row.logits[len(row.tokens) - 1] = np.asarray(logits)[i]
        for _ in range(steps):
            token = random.integers(0, tiny.VOCAB, batch).astype(np.int32)
            cache, logits = _step(lm.params, cache, token, config=lm.config, policy=policy)
            for i, row in enumerate(rows):
                row.tokens.append(int(token[i]))
                query = len(row.tokens) - 1
                row.sees(query, kept(cache, i), query)
                row.logits[query] = np.asarray(logits)[i]
    return rows, cache


TURNS = [([37, 20], 40), ([9, 23], 12)]


def test_full_cache_is_the_model_itself(lm):
    rows, cache = converse(lm, Full(), TURNS)
    for i, row in enumerate(rows):
        assert kept(cache, i) == [[list(range(len(row.tokens)))] * HEADS] * LAYERS
        row.check()
        # Decoding step by step gives what reading the whole text gives.
        tokens = jnp.asarray(np.pad(row.tokens, (0, 192 - len(row.tokens)))[None])
        whole = np.asarray(logits_of(lm.params, tokens, jnp.asarray([len(row.tokens)])))[0]
        for query, logits in row.logits.items():
            np.testing.assert_allclose(logits, whole[query], atol=TOLERANCE)


def ring(seen: int, sink: int, budget: int) -> list[int]:
    return sorted({*range(min(sink, seen)), *range(max(seen - (budget - sink), 0), seen)})


def test_sinks_and_window_keep_their_original_positions(lm):
    rows, cache = converse(lm, StreamingLLM(sink=2, budget=17), TURNS)
    for i, row in enumerate(rows):
        want = ring(len(row.tokens), 2, 17)
        assert [[sorted(head) for head in layer] for layer in kept(cache, i)] == [[want] * HEADS] * LAYERS
        row.check()


@pytest.mark.slow
@pytest.mark.parametrize("text", ["lagkv:sink=3,lag=8,ratio=0.25", "h2o:budget=16", "snapkv:window=4,budget=12"])
def test_scored_tokens_keep_their_original_positions(lm, text):
    policy = parse(text)
    rows, cache = converse(lm, policy, TURNS)
    cache = with_sorted_slots(cache, policy, lm.config)
    for i, row in enumerate(rows):
        heads = [head for layer in kept(cache, i) for head in layer]
        assert all(len(head) < len(row.tokens) and sorted(head) == head for head in heads)
        assert len({tuple(head) for head in heads}) > 1  # heads choose for themselves
        row.check()


def test_numbered_by_place_in_the_cache(lm):
    """Section 3.2 of StreamingLLM (arXiv 2309.17453): the bias grows evenly over the cache, without a jump."""
    sink, budget = 2, 17
    rows, _ = converse(lm, StreamingLLM(sink=sink, budget=budget, positions="cache"), TURNS)
    # Where decoding begins, then the second turn, then decoding again.
    for row, (one, two, again) in zip(rows, ((37, 77, 86), (20, 60, 83)), strict=True):
        row.hidden[:] = False
        place = np.tile(np.arange(len(row.tokens)), (len(row.tokens), 1))
        for query in range(one, len(row.tokens)):
            # A turn's queries see the ring as the last token left it, and a decoded token is in it already.
            prompt = two <= query < again
            seen = two if prompt else query + 1
            row.sees(query, [[ring(seen, sink, budget)] * HEADS] * LAYERS, two if prompt else query)
            place[query, :sink] += max(seen - budget, 0)
        row.check(place)


def test_renumbered_places_are_contiguous(lm):
    _, cache = converse(lm, StreamingLLM(sink=2, budget=17, positions="cache"), TURNS[:1])
    for i in range(2):
        for head in (head for layer in kept(cache, i) for head in layer):
            assert np.diff(sorted(head)).tolist() == [1] * 16


POLICIES = [None, "lagkv:ratio=0.5,lag=16", "streamingllm:window=30,positions=cache"]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_row_equals_itself_alone_and_the_plan_is_what_is_allocated(policy):
    lm = toys.tiny_model(positional="alibi", num_heads=6, num_kv_heads=3, norm="layer", mlp="gelu", embedding_norm=True)
    prompts = ["a prompt of some length, so that there is something to drop " * 3, "short", "neither long nor short"]
    together = kvjax.generate(lm, prompts, policy=policy, chat=False, max_new_tokens=30, stop_token_ids=())
    # The same shapes with other rows beside it, which compile nothing anew.
    alone = kvjax.generate(lm, prompts[1:2] * 3, policy=policy, chat=False, max_new_tokens=30, stop_token_ids=())
    assert [output.tokens for output in alone] == [together[1].tokens] * 3
    longest = len(lm.tokenizer.encode(prompts[0]))
    planned = kvjax.plan(lm, prompt_tokens=longest, batch=3, policy=policy, max_new_tokens=30)
    cache = together[0].cache
    assert all(layer.marks["position"].dtype == jnp.int32 for layer in cache.layers)
    assert planned.cache_bytes == sum(x.nbytes for x in jax.tree.leaves(cache)) * 4  # a row of padding among them
