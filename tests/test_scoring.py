"""Log-probabilities of given tokens: against the model's own forward, and against what generation returned."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys

import kvjax
from kvjax import errors
from kvjax.runtime import programs, token_logprobs
from kvjax.runtime.prefill import logits_of

RNG = np.random.default_rng(7)
PROMPTS = [RNG.integers(0, 256, size).tolist() for size in (50, 9, 31)]
ANSWERS = [RNG.integers(0, 256, size).tolist() for size in (12, 70, 1)]
POLICIES = (
    "full",
    "lagkv:ratio=0.5,lag=8,sink=4",
    "streamingllm:budget=20",
    "h2o:budget=24",
    "compensated:budget=24,sink=2",
    "round:watershed=1,top=0.5",
)


def forward(lm, ids, start: int) -> np.ndarray:
    """Log-probabilities of ``ids[start:]`` by the model's own forward over the whole sequence."""
    logits = logits_of(lm.params, jnp.asarray([ids]), jnp.asarray([len(ids)]))[0]
    logprobs = np.asarray(jax.nn.log_softmax(logits))
    return np.array([logprobs[i - 1, ids[i]] for i in range(start, len(ids))])


@pytest.mark.parametrize("way", ["prefill", "decode"])
def test_with_every_token_kept_it_is_the_models_own_forward(tiny_model, way):
    found = kvjax.score(tiny_model, PROMPTS, ANSWERS, way=way)
    for score, prompt, answer in zip(found, PROMPTS, ANSWERS, strict=True):
        assert score.tokens == tuple(answer)
        np.testing.assert_allclose(score.logprobs, forward(tiny_model, prompt + answer, len(prompt)), atol=1e-4)
        assert score.total == pytest.approx(sum(score.logprobs))
        assert score.perplexity == pytest.approx(math.exp(-score.total / len(answer)))


@pytest.mark.parametrize("policy", POLICIES)
def test_decodes_way_gives_what_generation_gave(tiny_model, policy):
    """Also past a chunk of steps, where the policy evicts, compacts or grows."""
    made = kvjax.generate(tiny_model, PROMPTS, policy=policy, max_new_tokens=80, logprobs=True)
    answers = [output.tokens for output in made]
    found = kvjax.score(tiny_model, PROMPTS, answers, way="decode", policy=policy)
    for score, output in zip(found, made, strict=True):
        np.testing.assert_allclose(score.logprobs, output.logprobs, atol=1e-5)


@pytest.mark.parametrize("way", ["prefill", "decode"])
def test_the_likeliest_tokens_are_the_models_own_argmax(tiny_model, way):
    """In every place, whatever the given token is: those of the whole sequence's logits."""
    for prompt, answer in zip(PROMPTS, ANSWERS, strict=True):
        ids = prompt + answer
        logits = logits_of(tiny_model.params, jnp.asarray([ids]), jnp.asarray([len(ids)]))[0]
        best = np.asarray(logits).argmax(axis=-1)[len(prompt) - 1 : -1]
        found = kvjax.score(tiny_model, prompt, answer, way=way)
        assert found.best_tokens == tuple(best.tolist()) and not found.is_greedy


def test_several_continuations_are_no_samples_of_greedy_decoding(tiny_model, capsys):
    errors.say_once.cache_clear()
    kvjax.score(tiny_model, "Who?", [" a", " b", " c"])
    assert not capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("policy", [POLICIES[1], POLICIES[3], POLICIES[5]])
def test_what_greedy_decoding_gave_is_greedy(tiny_model, policy):
    made = kvjax.generate(tiny_model, PROMPTS, policy=policy, max_new_tokens=20)
    for output, prompt in zip(made, PROMPTS, strict=True):
        other = [*output.tokens[:-1], (output.tokens[-1] + 1) % 256]
        found = kvjax.score(tiny_model, prompt, [output.tokens, other], way="decode", policy=policy)
        assert [score.is_greedy for score in found] == [True, False]
        assert found[1].best_tokens == output.tokens


@pytest.mark.parametrize("way", ["prefill", "decode"])
@pytest.mark.parametrize("policy", POLICIES[1:3])
def test_a_row_is_scored_as_it_would_be_alone(tiny_model, policy, way):
    together = kvjax.score(tiny_model, PROMPTS, ANSWERS, way=way, policy=policy)
    for score, prompt, answer in zip(together, PROMPTS, ANSWERS, strict=True):
        alone = kvjax.score(tiny_model, prompt, answer, way=way, policy=policy)
        np.testing.assert_allclose(alone.logprobs, score.logprobs, atol=1e-5)


@pytest.mark.slow
def test_prefills_way_reads_the_continuation_as_one_chunk(tiny_model):
    """What was dropped of the prompt is not seen, all of the continuation is: a ring of decode would drop it."""
    policy = kvjax.StreamingLLM(budget=20)
    answer = RNG.integers(0, 256, 40).tolist()
    read = kvjax.score(tiny_model, PROMPTS[0], answer, policy=policy)
    cache = kvjax.generate(tiny_model, PROMPTS[0], policy=policy, max_new_tokens=0).cache
    later = kvjax.generate(tiny_model, answer, cache=cache, max_new_tokens=0, prompt_logprobs=True)
    np.testing.assert_allclose(read.logprobs[1:], later.prompt_logprobs[1:], atol=1e-5)
    fed = kvjax.score(tiny_model, PROMPTS[0], answer, policy=policy, way="decode")
    assert fed.logprobs[0] == pytest.approx(read.logprobs[0], abs=1e-5)
    assert np.abs(np.subtract(fed.logprobs, read.logprobs)).max() > 1e-2


@pytest.mark.parametrize("way", ["prefill", "decode"])
def test_forms_of_prompts_and_continuations(tiny_model, way):
    text, answer = "What is it?", "A toy."
    ids = tiny_model.tokenizer.encode(answer)
    one = kvjax.score(tiny_model, text, answer, way=way)
    assert one.tokens == tuple(ids) and isinstance(one, kvjax.Score)
    np.testing.assert_allclose(
        one.logprobs,
        forward(tiny_model, kvjax.chat_tokens(tiny_model, text) + ids, len(kvjax.chat_tokens(tiny_model, text))),
        atol=1e-4,
    )
    # Several continuations of one prompt, which is read once; one continuation of several prompts.
    choices = kvjax.score(tiny_model, text, [answer, "Nothing at all.", ids], way=way)
    assert choices[0].logprobs == pytest.approx(one.logprobs, abs=1e-5) and choices[2] == choices[0]
    for_all = kvjax.score(tiny_model, [text, "Why?"], answer, way=way)
    assert len(for_all) == 2 and for_all[0].logprobs == pytest.approx(one.logprobs, abs=1e-5)
    assert len(kvjax.score(tiny_model, [text], [answer], way=way)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("way", ["prefill", "decode"])
def test_on_a_cache_that_was_read(tiny_model, way):
    policy, context = "lagkv:ratio=0.5,lag=8,sink=4", "A long text that says little, and says it again and again." * 2
    cache = kvjax.read(tiny_model, context, policy=policy)
    before = kvjax.generate(tiny_model, "Who?", cache=cache, max_new_tokens=12, logprobs=True)
    found = kvjax.score(tiny_model, ["Who?", "What?"], [before.tokens, "Me."], cache=cache, way=way)
    other = kvjax.score(tiny_model, "Who?", before.tokens, context=context, policy=policy, way=way)
    assert found[0].logprobs == pytest.approx(other.logprobs, abs=1e-5)
    if way == "decode":
        assert found[0].logprobs == pytest.approx(before.logprobs, abs=1e-5)
    after = kvjax.generate(tiny_model, "Who?", cache=cache, max_new_tokens=12)
    assert after.tokens == before.tokens  # the cache is a value still
    conversation = kvjax.read(tiny_model, context, policy="round:watershed=1,top=0.5")
    asked = kvjax.generate(tiny_model, "Who?", cache=conversation, max_new_tokens=12, logprobs=True)
    if way == "decode":
        rounds = kvjax.score(tiny_model, "Who?", asked.tokens, cache=conversation, way=way)
        assert rounds.logprobs == pytest.approx(asked.logprobs, abs=1e-5)
    else:
        with pytest.raises(kvjax.UsageError, match="decode's way"):
            kvjax.score(tiny_model, "Who?", asked.tokens, cache=conversation, way=way)


def test_a_growing_cache_is_repacked_on_the_way(tiny_model, monkeypatch):
    from kvjax.cache import buckets
    from kvjax.runtime import prefill_batches

    monkeypatch.setattr(buckets, "NEW_TOKENS", 8)
    monkeypatch.setattr(prefill_batches, "NEW_TOKENS", 8)
    answer = RNG.integers(0, 256, 90).tolist()
    found = kvjax.score(tiny_model, PROMPTS[1], answer, way="decode")
    np.testing.assert_allclose(found.logprobs, forward(tiny_model, PROMPTS[1] + answer, len(PROMPTS[1])), atol=1e-4)


def test_an_end_of_text_within_a_continuation_ends_nothing(tiny_model):
    answer = [4, tiny_model.stop_token_ids[0], 5, 6]
    found = kvjax.score(tiny_model, PROMPTS[1], answer, way="decode")
    np.testing.assert_allclose(found.logprobs, forward(tiny_model, PROMPTS[1] + answer, len(PROMPTS[1])), atol=1e-4)


@pytest.mark.parametrize(
    "change",
    [
        {"continuation": ""}, {"continuation": []}, {"continuation": None}, {"continuation": 3}, {"continuation": b"a"},
        {"continuation": [300]}, {"continuation": [[]]}, {"continuation": [""]}, {"continuation": {"a": 1}},
        {"continuation": [True]}, {"prompt": ""}, {"prompt": ["a", "b"], "continuation": ["a", "b", "c"]},
        {"way": "both"}, {"way": None}, {"way": 10**5000},
        {"way": np.zeros(3)},
        {"policy": "nonsense"}, {"continuation": "x" * 600}, {"lm": None},
        {"policy": "round:watershed=1", "way": "prefill"}, {"cache": 3}, {"chat": 1}, {"memory_limit": 0},
    ],
    ids=lambda change: str(next(iter(change))),
)  # fmt: skip
def test_what_makes_no_sense_is_one_sentence(tiny_model, change):
    given = {"lm": tiny_model, "prompt": "hello", "continuation": "you", **change}
    with pytest.raises(kvjax.UsageError) as caught:
        kvjax.score(**given)
    sentence = str(caught.value)
    assert sentence.endswith(".") and "\n" not in sentence and len(sentence) < 300


@pytest.mark.parametrize("policy", [*POLICIES[1:4:2], "lagkv:ratio=1,lag=8,sink=4,prefill=chunked"])
def test_prompt_logprobs_are_the_forwards(tiny_model, policy):
    """Of a prompt that is read at once nothing has left yet, whatever the policy."""
    asked = {"policy": policy, "max_new_tokens": 4, "logprobs": True}
    plain = kvjax.generate(tiny_model, PROMPTS, **asked)
    found = kvjax.generate(tiny_model, PROMPTS, prompt_logprobs=True, **asked)
    for output, other, prompt in zip(found, plain, PROMPTS, strict=True):
        assert output.tokens == other.tokens and output.logprobs == pytest.approx(other.logprobs, abs=1e-5)
        assert other.prompt_logprobs is None
        assert output.prompt_logprobs[0] is None and len(output.prompt_logprobs) == output.stats.prompt_tokens
        np.testing.assert_allclose(output.prompt_logprobs[1:], forward(tiny_model, prompt, 1), atol=1e-4)


@pytest.mark.slow
def test_prompt_logprobs_of_long_prompts_contexts_and_later_turns(monkeypatch):
    lm = toys.tiny_model(max_position=2048)
    ids = RNG.integers(0, 256, 300).tolist()
    # Few logits are alive at once, of however many tokens.
    monkeypatch.setattr(token_logprobs, "_LOGITS_BYTES", 1 << 16)
    long, short = kvjax.generate(lm, [ids, ids[:70]], max_new_tokens=1, prompt_logprobs=True, n=2)
    np.testing.assert_allclose(long[0].prompt_logprobs[1:], forward(lm, ids, 1), atol=1e-4)
    np.testing.assert_allclose(short[1].prompt_logprobs[1:], forward(lm, ids[:70], 1), atol=1e-4)
    context = kvjax.generate(
        lm, [ids[40:60], ids[40:45]], context=ids[:40], chat=False, max_new_tokens=1, prompt_logprobs=True
    )
    np.testing.assert_allclose(context[0].prompt_logprobs[1:], forward(lm, ids[:60], 1), atol=1e-4)
    np.testing.assert_allclose(context[1].prompt_logprobs[1:], forward(lm, ids[:45], 1), atol=1e-4)
    first = kvjax.generate(lm, ids[:30], max_new_tokens=4)
    later = kvjax.generate(lm, ids[30:50], cache=first.cache, max_new_tokens=1, prompt_logprobs=True)
    whole = [*ids[:30], *first.tokens, *ids[30:50]]
    assert later.prompt_logprobs[0] is None and len(later.prompt_logprobs) == 21
    np.testing.assert_allclose(later.prompt_logprobs[1:], forward(lm, whole, 34), atol=1e-4)


def test_prompt_logprobs_come_only_on_request(tiny_model):
    """Without them no other program runs: what is compiled is what was."""
    before = programs.SCORE_FRESH.compilations(), programs.SCORE_ONTO.compilations()
    first = kvjax.generate(tiny_model, PROMPTS[2], max_new_tokens=1)
    kvjax.generate(tiny_model, PROMPTS[1], cache=first.cache, max_new_tokens=1)
    assert (programs.SCORE_FRESH.compilations(), programs.SCORE_ONTO.compilations()) == before
    with pytest.raises(kvjax.UsageError, match="prompt_logprobs needs"):
        kvjax.generate(tiny_model, PROMPTS[1], policy="round:watershed=1", prompt_logprobs=True)
