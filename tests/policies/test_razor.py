"""RazorAttention: who is protected, that every group is its policy alone, and sizes of the whole."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys
from support.driver import config_for, random_kv
from support.oracles import same_caches
from support.scorers import with_profiles

import kvjax
from kvjax.cache.attention import decode_attention
from kvjax.cache.groups import HeadGroups
from kvjax.calibrate import ScopeProfile, retrieval_heads
from kvjax.errors import UsageError
from kvjax.policies import CompensatedRing, Full, LagKV, Policy, QFilters, RazorAttention, StreamingLLM, parse
from kvjax.policies.base import PromptChunk, Step
from kvjax.policies.composed import HeadWise
from kvjax.policies.head_choice import protected_heads
from kvjax.policies.page_capacities import page_capacities
from kvjax.policies.profile import ModelShape
from kvjax.policies.profile_files import packaged, save_profile
from kvjax.policies.signals import Mass, PromptSignals, QueryStats
from kvjax.runtime.compilation import compile_clock
from kvjax.runtime.programs import ONE_DEVICE

HEADS, GROUP, DIM, PROMPT_TOKENS, STEPS = 3, 2, 8, 128, 40


# --- every group is its policy, run alone on its heads ----------------------------------------------------------------


def small_policies() -> list[Policy]:
    """Every registered policy that can be an inner one, at a size that drops much of 128 tokens."""
    sized = []
    for cls in kvjax.policies.registry().values():
        fields = {field.name for field in dataclasses.fields(cls)}
        if not issubclass(cls, HeadWise) and not cls.offloads_rounds and cls is not QFilters:  # which needs every head
            made = cls(**{name: value for name, value in (("budget", 48), ("lag", 16)) if name in fields})
            sized.append(with_profiles(made, config_for(HEADS, DIM)))
    return sized


def random_signals(seed: int) -> PromptSignals:
    """Masses and query statistics that no two heads share."""
    rng = np.random.default_rng(seed)
    mass = rng.random((2, HEADS, GROUP, PROMPT_TOKENS)).astype(np.float32)
    spread = rng.standard_normal((2, HEADS, GROUP, DIM, DIM)).astype(np.float32)
    return PromptSignals(
        window=Mass(None, jnp.asarray(mass)),
        columns=Mass(None, jnp.asarray(mass[..., ::-1])),
        queries=QueryStats(
            jnp.full((2,), 100.0),
            jnp.asarray(rng.standard_normal((2, HEADS, GROUP, DIM)).astype(np.float32)),
            jnp.asarray(np.einsum("...ij,...kj->...ik", spread, spread)),
        ),
        noncausal=Mass(None, jnp.asarray(2 * mass)),
        repeat=Mass(None, jnp.asarray(mass[:, :, :1])),
        outputs=Mass(None, jnp.asarray(mass[..., ::-1] + 0.1)),
        hidden=Mass(None, jnp.asarray(mass[:, :, :1])),
    )


@functools.partial(jax.jit, static_argnames=("policy", "config"))
def lived(policy, config, k, v, q, count, signals):
    """One layer through a prompt and decode steps: the cache and every step's output."""
    pages = page_capacities(policy, config, PROMPT_TOKENS, STEPS)[0]
    zero = jnp.zeros_like(count)
    chunk = PromptChunk(zero, count, count, pages=pages, config=config, fresh=True, signals=signals)
    cache = policy.init_layer(config, 0, 2, pages, jnp.float32)
    cache = policy.compress(0, cache, k[:, :, :PROMPT_TOKENS], v[:, :, :PROMPT_TOKENS], chunk)

    def body(carry, token):
        cache, seen = carry
        k, v, q = token
        step = Step(seen, jnp.asarray([True, True]), config=config)
        if policy.maintains:
            due = policy.due((cache,), config)
            for row in range(2):
                kept = policy.maintain(0, cache, config, jnp.int32(row), seen[row])
                cache = jax.tree.map(lambda a, b, row=row: jnp.where(due[row], a, b), kept, cache)
        cache = policy.append(0, cache, k, v, step)
        out, logits = decode_attention(q, cache, scale=DIM**-0.5, with_logits=policy.signals.decode_logits)
        return (policy.observe(0, cache, logits, step), seen + 1), out

    tokens = (x[:, :, PROMPT_TOKENS:].swapaxes(0, 2).swapaxes(1, 2) for x in (k, v))
    (cache, _), outputs = jax.lax.scan(body, (cache, count), (*tokens, q))
    return cache, outputs


@pytest.mark.parametrize("inner", small_policies(), ids=lambda policy: type(policy).__name__)
def test_protected_heads_are_fulls_and_the_others_the_inner_policys_alone(inner):
    k, v = random_kv(7, 2, HEADS, PROMPT_TOKENS + STEPS, DIM)
    q = np.random.default_rng(1).standard_normal((STEPS, 2, HEADS, GROUP, DIM)).astype(np.float32)
    count, signals = jnp.asarray([128, 90]), random_signals(2)
    razor = RazorAttention(heads=((0, 1),), inner=inner)
    config = config_for(HEADS, DIM)
    razor.check(config)
    cache, outputs = lived(razor, config, k, v, q, count, signals)
    assert isinstance(cache, HeadGroups) and cache.heads == ((1,), (0, 2))
    for i, (policy, heads) in enumerate([(Full(), (1,)), (inner, (0, 2))]):
        own = signals.of_heads(heads)
        alone, own_outputs = lived(
            policy, config_for(len(heads), DIM), k[:, heads], v[:, heads], q[:, :, heads], count, own
        )
        group = cache.groups[i]
        assert group.pages == alone.pages
        jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-6), group, alone)
        np.testing.assert_allclose(outputs[:, :, heads], own_outputs, atol=1e-6)
        retained = np.asarray(razor.retained(cache))[:, heads]
        np.testing.assert_array_equal(retained, policy.retained(alone))


# --- which heads, from where ------------------------------------------------------------------------------------------


@functools.cache
def toy():
    return toys.tiny_model(num_layers=3, num_heads=6, num_kv_heads=3)


@functools.cache
def toy_profile():
    return retrieval_heads(toy(), tokens=30)


def held(policy: Policy, config=None, total: int = 400) -> list[list[int]]:
    """KV heads that keep all of a prompt, by layer."""
    config = config or toy().config
    budgets = [np.asarray(policy.budgets(config, layer, np.array([total])))[0] for layer in range(config.num_layers)]
    return [np.flatnonzero(row == total).tolist() for row in budgets]


def test_the_profile_and_the_shares_decide():
    profile = toy_profile()
    for shares in (dict(), dict(induction_share=0.3, echo_share=0.0), dict(induction_share=0.0, share_of="kv")):
        policy = RazorAttention(profile=profile, budget=20, **shares)
        wanted = (shares.get("induction_share", 0.14), shares.get("echo_share", 0.01), shares.get("share_of", "query"))
        assert held(policy) == [list(heads) for heads in protected_heads(profile, *wanted)]
    nobody = RazorAttention(profile=profile, budget=20, induction_share=0.0, echo_share=0.0)
    assert held(nobody) == [[], [], []]
    assert held(RazorAttention(heads="0.1+2.0+2.2", budget=20)) == [[1], [], [0, 2]]


def test_the_default_models_profile_comes_with_kvjax_and_others_are_asked_for():
    from kvjax.calibrate import HeadProfile
    from kvjax.model.config import ModelConfig, RopeConfig

    smollm2 = ModelConfig("llama", 49152, 576, 1536, 30, 9, 3, 64, 8192, RopeConfig(theta=1e5), tie_embeddings=True)
    policy = RazorAttention()
    policy.check(smollm2)
    assert packaged(HeadProfile, smollm2) is not None
    assert sum(map(len, policy.protected(smollm2))) == 22
    with pytest.raises(UsageError, match="kvjax calibrate retrieval-heads"):
        policy.check(toy().config)
    with pytest.raises(UsageError, match="another model"):
        RazorAttention(profile=toy_profile()).check(smollm2)


def test_text_form_and_profile_files(tmp_path):
    path = tmp_path / "toy.yaml"
    save_profile(toy_profile(), path)
    policy = parse(f"razor:profile={path},ratio=0.6,compensation=false")
    assert policy == RazorAttention(profile=toy_profile(), ratio=0.6, compensation=False)
    assert hash(policy) == hash(RazorAttention(profile=str(path), ratio=0.6, compensation=False))
    for known in (policy, parse("razor:heads=0.1+2.0,inner=streamingllm(sink=2,window=9),echo_share=0.2")):
        assert parse(kvjax.policies.format_policy(known)) == known
    assert parse("razor:inner=lagkv").inner == LagKV()


# --- sizes ------------------------------------------------------------------------------------------------------------


TEXT = "Some of this is worth remembering and most of it is not. " * 7  # 399 tokens of a byte


def ask(policy, prompt=TEXT, new=4, lm=None, **options):
    options = dict(chat=False, max_new_tokens=new, stop_token_ids=()) | options
    return kvjax.generate(lm or toy(), prompt, policy=policy, **options)


@pytest.mark.parametrize(
    "ratio, inner", [(0.5, None), (0.75, None), (0.5, StreamingLLM()), (0.5, LagKV(lag=16, sink=4)), (1.0, None)]
)
def test_a_ratio_is_what_the_whole_cache_keeps(ratio, inner):
    policy = RazorAttention(heads=((0, 1), (2, 0)), ratio=ratio, inner=inner)
    stats = ask(policy, new=0).stats
    assert stats.live_cache_bytes <= ratio * stats.full_cache_bytes
    slack = 7 * (25 if isinstance(inner, LagKV) else 1)  # LagKV keeps the same whole number of each 16
    slot = stats.full_cache_bytes // (stats.seen * 9)
    assert stats.live_cache_bytes >= ratio * stats.full_cache_bytes - slack * slot


@pytest.mark.parametrize("inner", small_policies(), ids=lambda policy: type(policy).__name__)
def test_any_inner_policy_of_a_size_takes_it_from_the_whole(inner):
    """A window that a policy observes with is no size: it stays, given or not."""
    if isinstance(inner, Full):
        return
    shape = {name: 16 for name in ("window", "lag") if getattr(inner, name, None) is not None}
    unsized = with_profiles(type(inner)(**shape), toy().config)
    for size in (dict(budget=40), dict(ratio=0.6)):
        policy = RazorAttention(heads=((0, 1), (2, 0)), inner=unsized, **size)
        policy.check(toy().config)
        sized = policy.others(toy().config)
        wanted = dict(budget=40) if "budget" in size else dict(ratio=pytest.approx((0.6 * 9 - 2) / 7))
        assert {name: getattr(sized, name) for name in (*wanted, *shape)} == wanted | shape


def test_a_ratio_below_what_protected_heads_hold_is_refused_with_the_least_that_works():
    heads = ((0, 1), (2, 0), (2, 1))
    with pytest.raises(UsageError, match=r"3 protected of 9 KV heads.*at least 0\.334"):
        ask(RazorAttention(heads=heads, ratio=0.33))
    RazorAttention(heads=heads, ratio=0.334).check(toy().config)
    everything = tuple((layer, head) for layer in range(3) for head in range(3))
    with pytest.raises(UsageError, match="All KV heads are protected"):
        RazorAttention(heads=everything, ratio=0.5).check(toy().config)


@pytest.mark.parametrize("heads", ["0.1+0.1", ((0, 1), (2, 0), (0, 1))])
def test_a_head_named_twice_is_refused(heads):
    with pytest.raises(UsageError, match="KV head 1 of layer 0 twice"):
        RazorAttention(heads=heads)


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy, storage",
    [
        (RazorAttention(heads=((0, 1), (1, 0)), budget=40), "int8"),
        (RazorAttention(heads=((0, 1), (1, 0), (1, 1), (1, 2)), inner=LagKV(lag=16)), None),
    ],
)
def test_the_plan_is_what_is_allocated(policy, storage):
    output = ask(policy, new=8, storage=storage)
    planned = kvjax.plan(toy(), prompt_tokens=len(TEXT), max_new_tokens=8, policy=policy, storage=storage)
    assert planned.cache_bytes == output.cache.nbytes
    assert planned.capacities == tuple(layer.slots for layer in output.cache.layers)
    assert ask(policy, new=0, storage=storage).stats.retained == planned.retained


@pytest.mark.slow
def test_short_rows_do_not_pay_for_the_papers_buffer():
    """4,000 slots a head are for prompts that fill them."""
    razor, full = (ask(policy, new=4) for policy in (RazorAttention(heads=((0, 1),)), None))
    assert razor.stats.cache_bytes < 1.1 * full.stats.cache_bytes


# --- end to end -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_nothing_dropped_is_the_full_cache():
    prompts = [TEXT, "short"]
    own, full = (ask(policy, prompts, 30) for policy in (RazorAttention(heads=((0, 1), (2, 0))), None))
    assert [output.tokens for output in own] == [output.tokens for output in full]
    assert [output.stats.retained for output in own] == [output.stats.retained for output in full]


@pytest.mark.slow
def test_a_row_equals_itself_alone_over_two_turns():
    policy = RazorAttention(heads=((0, 1), (1, 0), (1, 1)), budget=40)
    lm = toys.tiny_model()
    prompts, more = [TEXT[:250], TEXT[:199]], ["go on", "so, what then?"]
    together = ask(policy, prompts, 20, lm)
    turn = ask(None, more, 20, lm, cache=[output.cache for output in together])
    for i in range(2):
        alone = ask(policy, prompts[i], 20, lm)
        assert alone.tokens == together[i].tokens and alone.stats.retained == together[i].stats.retained
        second = ask(None, more[i], 20, lm, cache=alone.cache)
        assert second.tokens == turn[i].tokens and second.stats.retained == turn[i].stats.retained


def test_an_inner_policy_may_read_the_prompt_in_chunks():
    policy = RazorAttention(heads=((0, 1),), inner=LagKV(lag=16, sink=4, ratio=0.5, prefill="chunked"))
    output = ask(policy, TEXT[:250], 0, toys.tiny_model())
    assert policy.chunks(toys.tiny_config()) == (36, 16)
    assert output.stats.retained[0][1] == 250 and output.stats.retained[0][0] <= 125


@pytest.mark.slow
def test_a_ring_beside_protected_heads_keeps_its_size_when_the_pools_grow():
    """Its size is a share of the first prompt, not of all that was read since."""
    policy = RazorAttention(heads=((0, 1), (1, 0), (2, 2)), inner=StreamingLLM(ratio=0.25))
    first = ask(policy, TEXT[:100], 0).cache
    later = ask(None, TEXT[:250], 0, cache=first).cache
    assert later.prompt_capacity > first.prompt_capacity
    bigger = ONE_DEVICE.grow(later, config=toy().config, new_capacity=2 * later.new_capacity)
    for layer, old in zip(bigger.layers, first.layers, strict=True):
        (kept, others), (full, ring) = layer.groups, old.groups
        assert sum(kept.pages) > sum(full.pages) and others.pages == ring.pages


def test_decoding_three_times_the_buffer_compiles_nothing():
    policy = RazorAttention(heads=((0, 1), (2, 0)), budget=40)
    ask(policy, TEXT[:200], 8)
    with compile_clock() as clock:
        output = ask(policy, TEXT[:200], 130)
    assert len(output.tokens) == 130 and clock.programs == 0
    assert output.stats.retained == ((40, 329, 40), (40, 40, 40), (329, 40, 40))


@pytest.mark.slow
def test_a_layer_whose_heads_are_all_protected_is_the_full_caches():
    everything = tuple((layer, head) for layer in range(3) for head in range(3))
    own, full = ask(RazorAttention(heads=everything), TEXT, 8), ask(None, TEXT, 8)
    assert not any(isinstance(layer, HeadGroups) for layer in own.cache.layers)
    same_caches(own.cache, full.cache)
    assert own.tokens == full.tokens


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bad",
    [
        dict(induction_share=1.5), dict(echo_share=-0.1), dict(share_of="layer"), dict(ratio=0), dict(budget=5),
        dict(ratio=0.5, budget=20), dict(heads="0-1"), dict(heads=((0,),)), dict(heads=3), dict(profile=3),
        dict(profile="nowhere.yaml"), dict(inner="lagkv"), dict(inner=RazorAttention()), dict(bound="tight"),
        dict(inner=StreamingLLM(positions="cache")), dict(inner=LagKV(), sink=2), dict(eps=0), dict(sink=-1),
        dict(inner=LagKV(ratio=0.5), ratio=0.5), dict(inner=Full(), budget=50), dict(compensation="no"),
        dict(inner=CompensatedRing(lengths=((5, 6), (7, 8), (9, 10)))),
    ],
)  # fmt: skip
def test_bad_parameters_are_one_sentence(bad):
    with pytest.raises(UsageError) as error:
        RazorAttention(**bad)
    assert "\n" not in str(error.value) and str(error.value).endswith(".")


def test_what_does_not_belong_to_the_model_is_refused():
    with pytest.raises(UsageError, match="KV head 3 of layer 0"):
        RazorAttention(heads=((0, 3),)).check(toy().config)
    shape = ModelShape.of(toy().config)
    table = ((1.0,) * 6,) * 3
    with pytest.raises(UsageError, match="not one of retrieval-heads"):
        RazorAttention(profile=ScopeProfile("toy", shape, table, table, table)).check(toy().config)
    # The last layer that LagKV's variant would compress is all protected.
    heads = tuple((2, head) for head in range(3))
    with pytest.raises(UsageError, match="compress nothing"):
        RazorAttention(heads=heads, inner=LagKV(variant="l2")).check(toy().config)


@pytest.mark.slow
def test_the_real_model_finds_what_its_retrieval_heads_kept(default_model):
    """40 % of the cache, the pass key far outside every other head's buffer."""
    filler = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
    key = "The pass key is 71432. Remember it. 71432 is the pass key. "
    text = f"Find the important info in this text. {filler * 3}{key}{filler * 12}What is the pass key?"
    asked = [{"role": "user", "content": text}, {"role": "assistant", "content": "The pass key is"}]
    output = kvjax.generate(default_model, asked, policy=RazorAttention(ratio=0.4), max_new_tokens=6)
    assert "71432" in output.text
    assert output.stats.live_cache_bytes < 0.41 * output.stats.full_cache_bytes
    assert sum(kept == output.stats.seen for heads in output.stats.retained for kept in heads) == 22
