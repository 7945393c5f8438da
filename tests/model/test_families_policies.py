"""Policies run on every family: they answer, and keep what they keep of the same sizes whatever the family."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from support import family_cases as cases
from support.scorers import with_profiles

import kvjax
from kvjax.checkpoints.load import load
from kvjax.errors import UsageError
from kvjax.policies import parse, registry

POLICIES = {
    "full": "full",
    "streamingllm": "streamingllm:budget=12,positions=cache",
    "lagkv": "lagkv:ratio=0.5,lag=8,sink=4",
    "h2o": "h2o:budget=12",
    "tova": "tova:budget=12",
    "ahakv": "ahakv:budget=12,recent=4",
    "razor": "razor:heads=0.0,budget=9,sink=2",
    "compensated": "compensated:budget=12,sink=2",
    "snapkv": "snapkv:budget=12,window=4",
    "pyramidkv": "pyramidkv:budget=12,window=4,beta=4",
    "slimkv": "slimkv:budget=12,window=4",
    "finch": "finch:budget=12,window=4,chunk=8",
    "nacl": "nacl:budget=12",
    "keydiff": "keydiff:budget=12",
    "expected_attention": "expected_attention:budget=12,future=16",
    "chunkkv": "chunkkv:budget=12,chunk=4",
    "compactor": "compactor:budget=12,sink=2,recent=2,chunk=8",
    "criticalkv": "criticalkv:budget=12,inner=snapkv(window=4)",
    "adaptive": "adaptive:budget=12,inner=keydiff",
    "merged": "merged:budget=12,inner=snapkv(window=4)",
    "think": "think:channels=0.5,window=4,inner=snapkv(budget=12,window=4)",
    "qfilters": "qfilters:budget=12",  # with filters of the model
    "duo": "duo:heads=0.5,sink=2,recent=8",  # with gates of the model
    "learned": "learned:budget=12,sink=2",  # with a scorer of the model
    "kvzip": "kvzip:budget=12,sink=2,chunk=8",
    "round": "round:watershed=1,top=0.5",
}
#: Families some of whose layers have windows, and those all of whose layers have.
WINDOWED = ("ministral", "qwen2_window", "qwen3_window", "gemma2", "gemma3", "cohere2", "olmo3", "gpt_oss")
ALL_WINDOWED = ("mistral_window", "phi3_window", "starcoder2_window")
#: What is not for every family, with what it says.
REFUSED = {
    **{(case, "round"): "window" for case in WINDOWED},
    **{(case, policy): "window" for case in ALL_WINDOWED for policy in POLICIES if policy != "full"},
    ("mpt", "round"): "rotary",
    ("mpt", "razor"): "leave out heads",
    ("mpt", "compensated"): "give compensation=False",
    ("mpt", "expected_attention"): "leave out future",
    ("phi3_long", "streamingllm"): "longrope",
}
GRID = [(case, policy) for case in cases.CASES for policy in POLICIES]
#: By default every policy meets a family, each with features of its own; the golden logits are of every family.
DEFAULT = {
    ("phi3_window", "full"), ("phi", "streamingllm"), ("gemma3", "lagkv"), ("gemma2", "h2o"), ("ministral", "tova"),
    ("cohere2", "ahakv"), ("qwen3_window", "razor"), ("olmo3", "compensated"), ("qwen2_moe", "snapkv"),
    ("glm4", "pyramidkv"), ("falcon_new", "slimkv"), ("granite", "nacl"), ("smollm3", "keydiff"),
    ("qwen3_moe", "expected_attention"), ("mixtral", "round"), ("olmo2", "chunkkv"), ("stablelm", "compactor"),
    ("gpt_oss", "kvzip"), ("cohere", "criticalkv"),
    ("granite", "qfilters"), ("phi3", "adaptive"), ("olmo3", "learned"), ("gemma2", "duo"),
    ("starcoder2", "finch"), ("gpt_neox", "merged"), ("qwen2_moe", "think"),
    *REFUSED,
}  # fmt: skip


def test_every_policy_is_here():
    run = {policy for case, policy in DEFAULT - set(REFUSED)}
    assert set(POLICIES) == set(registry()) == run and {(case.name, policy) for case, policy in GRID} >= DEFAULT


@pytest.mark.parametrize(
    ("case", "policy"),
    [pytest.param(*each, marks=[] if (each[0].name, each[1]) in DEFAULT else pytest.mark.slow) for each in GRID],
    ids=[f"{case.name}-{policy}" for case, policy in GRID],
)
def test_a_policy_answers(case, policy, tmp_path):
    tensors = cases.values(case, cases.shapes(case))
    lm = load(cases.write_folder(case, tmp_path / "m", tensors), dtype="float32", progress=False)
    lm = dataclasses.replace(lm, stop_token_ids=())
    chosen = parse(POLICIES[policy])
    chosen = with_profiles(chosen, lm.config)
    options = {"policy": chosen, "max_new_tokens": 5, "logprobs": True}
    prompts = [case.tokens(40).tolist(), case.tokens(17).tolist()]
    if (case.name, policy) in REFUSED:
        with pytest.raises(UsageError, match=REFUSED[case.name, policy]):
            kvjax.generate(lm, prompts, **options)
        return
    both = kvjax.generate(lm, prompts, **options)
    for prompt, output in zip(prompts, both, strict=True):
        assert len(output.tokens) == 5 and np.isfinite(output.logprobs).all()
        alone = kvjax.generate(lm, prompt, **options)
        assert alone.tokens == output.tokens
        np.testing.assert_allclose(alone.logprobs, output.logprobs, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["razor:heads=0.0,budget=60,sink=2", "h2o:budget=60", "ahakv:budget=60,recent=4"])
def test_a_policy_that_drops_nothing_answers_as_the_full_cache_does_beside_sinks(policy, tmp_path):
    case = next(case for case in cases.CASES if case.name == "gpt_oss")
    tensors = cases.values(case, cases.shapes(case))
    lm = load(cases.write_folder(case, tmp_path / "m", tensors), dtype="float32", progress=False)
    options = {"max_new_tokens": 5, "logprobs": True, "stop_token_ids": []}
    full, other = (kvjax.generate(lm, case.tokens(40).tolist(), policy=each, **options) for each in ("full", policy))
    assert full.tokens == other.tokens
    np.testing.assert_allclose(full.logprobs, other.logprobs, atol=1e-5)
