"""``best``: which policy it becomes, that every way to a policy runs under that one, and says so."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import toys

import kvjax
from kvjax.errors import UsageError
from kvjax.eval.entries import Entry, entries
from kvjax.policies import AdaptiveHeads, Best, Full, RazorAttention, RoundAttention, format_policy, parse, registry
from kvjax.policies.best import RULES, resolve
from kvjax.prompts import as_told

ROOT = Path(__file__).resolve().parents[2]
SHAPE = dict(vocab_size=49152, hidden_size=576, intermediate_size=1536, num_layers=30, num_heads=9, num_kv_heads=3)
#: A model whose retrieval heads' profile comes with kvjax, and two that have none.
PROFILED = toys.tiny_config(**SHAPE, head_dim=64, max_position=8192)
PLAIN = toys.tiny_config()
WINDOWS = toys.tiny_config(windows=(16, None))
ALIBI = toys.tiny_config(positional="alibi", norm="layer", mlp="gelu")
PROMPT = "The harbour was built in 1886. Its light is green. " * 3


def text(config, ratio: float, later: bool) -> str:
    return format_policy(resolve(Best(ratio=ratio), config, later=later).policy)


@pytest.mark.parametrize(
    ("ratio", "share", "later"),
    [
        *((ratio, 0.03, later) for ratio in (0.9, 0.5, 0.25) for later in (True, False)),
        *((ratio, 0.02, False) for ratio in (0.249, 0.125, 0.08)),
    ],
)
def test_a_model_with_a_profile_keeps_its_retrieval_heads(ratio, share, later):
    found = resolve(Best(ratio=ratio), PROFILED, later=later)
    assert found.policy == parse(f"razor:inner=compactor,induction_share={share},ratio={ratio}")
    assert found.line is not None and "\n" not in found.line and "docs/results/comparison.md" in found.line
    assert f"best is razor:inner=compactor,induction_share={share},ratio={ratio}: " in found.line


@pytest.mark.parametrize("config", [PROFILED, PLAIN])
@pytest.mark.parametrize("ratio", [0.249, 0.125, 0.05])
def test_little_is_shared_by_all_layers(config, ratio):
    found = resolve(Best(ratio=ratio), config, later=True)
    assert found.policy == parse(f"adaptive:inner=kvzip,scope=model,ratio={ratio}")
    assert "at an eighth, where it found 118 of 120" in str(found.line)


@pytest.mark.parametrize(
    ("config", "ratio", "reason", "when"),
    [
        (PLAIN, 0.25, "No profile", (True, False)),
        (ALIBI, 0.5, "In an ALiBi model", (True, False)),
        (PROFILED, 0.05, "ratio=0.05 is less than", (False,)),
        (WINDOWS, 0.25, "No profile", (True, False)),
        (WINDOWS, 0.125, "No profile", (True, False)),
    ],
)
def test_where_it_cannot_run_the_next_one_does(config, ratio, reason, when):
    for later in when:
        found = resolve(Best(ratio=ratio), config, later=later)
        assert found.policy == parse(f"adaptive:inner=kvzip,ratio={ratio}")
        assert f"Not razor: {reason}" in str(found.line)
        assert ("comes after" in str(found.line)) is later and ("is in view" in str(found.line)) is not later


def test_a_ratio_may_be_a_number_of_numpy():
    for number in (np.float64(0.25), np.float32(0.25)):
        assert text(PLAIN, number, True) == text(PLAIN, 0.25, True)


def test_what_it_cannot_be_is_one_sentence():
    with pytest.raises(UsageError, match="leave the policy out"):
        resolve(Best(), toys.tiny_config(windows=(16, 16)), later=True)
    for ratio in (0, 1.5, float("nan"), "half"):
        with pytest.raises(UsageError, match=f"ratio is .*{ratio}"):
            Best(ratio=ratio)
    with pytest.raises(UsageError, match="no option 'budget'"):
        parse("best:budget=100")
    nested = (
        lambda: RazorAttention(inner=Best()),
        lambda: RoundAttention(inner=Best()),
        lambda: parse("razor:inner=best"),
    )
    for made in nested:
        with pytest.raises(UsageError, match="cannot be a part of another"):
            made()
    with pytest.raises(UsageError, match=r"inner is Best, .*; give AdaptiveHeads a policy that does"):
        AdaptiveHeads(inner=Best())
    with pytest.raises(UsageError, match="already belongs to Best"):
        kvjax.policies.register("best", Full)
    assert "best" not in registry() and parse(format_policy(Best(ratio=0.3))) == Best(ratio=0.3)


def test_another_policy_is_itself():
    policy = parse("snapkv:ratio=0.5")
    assert resolve(policy, PLAIN, later=True) == resolve(policy, PLAIN, later=False)
    assert resolve(policy, PLAIN, later=True).policy is policy


@pytest.mark.slow
def test_a_ratio_of_one_keeps_everything(tiny_model):
    output = kvjax.generate(tiny_model, PROMPT, policy="best:ratio=1", max_new_tokens=4)
    assert output.tokens == kvjax.generate(tiny_model, PROMPT, max_new_tokens=4).tokens
    assert output.cache.policy == Full() and output.stats.choice == "best is full: ratio=1 keeps every token"


@pytest.mark.slow
def test_every_way_to_ask_runs_under_what_it_becomes(tiny_model, tmp_path):
    """Generate, continue, read, save, chat, plan: all of them say what it is, and answer as under that policy."""
    lm, asked, named = tiny_model, "best:ratio=0.5", "adaptive:inner=kvzip,ratio=0.5"
    output, other = (kvjax.generate(lm, PROMPT, policy=policy, max_new_tokens=5) for policy in (asked, named))
    assert output.tokens == other.tokens and output.stats.retained == other.stats.retained
    assert "is in view" in output.stats.choice and other.stats.choice is None
    assert kvjax.tables.stats_rows(output)[-3] == ("policy", output.stats.choice)
    told = as_told(lm, parse(named))
    cache = kvjax.read(lm, PROMPT, policy=asked)
    assert cache.policy == told
    kvjax.save_cache(tmp_path / "cache", cache, lm)
    loaded = kvjax.load_cache(tmp_path / "cache", lm)
    assert loaded.policy == told
    again = kvjax.generate(lm, "Green?", cache=loaded, policy=asked, max_new_tokens=3)
    assert again.tokens == kvjax.generate(lm, "Green?", cache=cache, max_new_tokens=3).tokens
    assert "comes after" in again.stats.choice
    with pytest.raises(UsageError, match="it continues with that policy"):
        kvjax.generate(lm, "Green?", cache=loaded, policy="best:ratio=0.25")
    plan = kvjax.plan(lm, prompt_tokens=100, policy=asked)
    assert plan.policy == format_policy(parse(named)) and plan.choice == output.stats.choice
    assert plan.choice in str(plan)
    assert "comes after" in kvjax.plan(lm, prompt_tokens=50, context_tokens=50, policy=asked).choice
    chat = kvjax.Chat(lm, policy=asked, max_new_tokens=3)
    assert "comes after" in chat.send("Hello there.").stats.choice  # later questions do
    assert chat.cache.policy == told and format_policy(chat.policy) == asked


@pytest.mark.slow
def test_slots_and_jobs_run_under_what_it_becomes(tiny_model, tmp_path):
    lm, asked, named = tiny_model, "best:ratio=0.5", "adaptive:inner=kvzip,ratio=0.5"
    (tmp_path / "in.jsonl").write_text('{"prompt": "Hello there"}\n')
    report = kvjax.batch.run(lm, tmp_path / "in.jsonl", tmp_path / "out", policy=asked, max_new_tokens=2)
    assert report.answered == 1 and "is in view" in str(report.choice)
    assert format_policy(parse(named)) in (tmp_path / "out" / "manifest.json").read_text()
    with kvjax.Engine(lm, policy=asked, slots=1, prompt_tokens=64, new_tokens=8) as engine:
        output = engine.submit("Hello there", max_new_tokens=3).result()
    assert output.tokens == kvjax.generate(lm, "Hello there", policy=named, max_new_tokens=3).tokens
    assert "is in view" in output.stats.choice


@pytest.mark.slow
def test_a_conversation_runs_under_one_budget_of_all_layers(tiny_model):
    """What it is at an eighth: turn by turn, and as from a context that was read before."""
    asked = "best:ratio=0.125"
    chat = kvjax.Chat(tiny_model, policy=asked, context=PROMPT, max_new_tokens=3, stop_token_ids=[])
    outputs = [chat.send(text) for text in ("Hello there.", "And its light?", "When was it built?")]
    assert "scope=model" in outputs[0].stats.choice and len(set(outputs[-1].stats.retained)) > 1
    again = kvjax.Chat(tiny_model, policy=asked, context=PROMPT, max_new_tokens=3, stop_token_ids=[])
    assert [again.send(text).tokens for text in ("Hello there.", "And its light?")] == [o.tokens for o in outputs[:2]]


def test_comparisons_take_it_as_any_policy():
    assert entries("best", [0.5, 0.25])[1:] == [Entry("best", 0.5), Entry("best", 0.25)]
    assert Entry("best", 0.25).policy() == Best(ratio=0.25)


def test_the_guide_shows_the_table():
    guide = (ROOT / "docs" / "guides" / "policies.md").read_text()
    for rule in RULES:
        question = "comes later" if rule.later else "in view"
        least = f"from {rule.least:g}" if rule.least else "any ratio"
        row = rf"\| {question} \| {re.escape(least)} \| `{re.escape(rule.policy)}` \| .* \|"
        assert re.search(row, guide), (rule, row)
