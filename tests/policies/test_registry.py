"""The text form of policies."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import subprocess
import sys

import pytest

import kvjax
from kvjax import policies
from kvjax.errors import UsageError, listed
from kvjax.policies import NACL, ExpectedAttention, Full, LagKV, SnapKV, StreamingLLM, names


@pytest.mark.parametrize(
    "text, policy",
    [
        ("full", Full()),
        ("lagkv", LagKV()),
        ("lagkv:ratio=0.25,sink=16", LagKV(ratio=0.25, sink=16)),
        (" LagKV : partition_ratio=0.5 , lag=64 ", LagKV(partition_ratio=0.5, lag=64)),
        ("streaming:window=100,positions=cache", StreamingLLM(window=100, positions="cache")),
        ("snap:window=16,pooling=max", SnapKV(window=16, pooling="max")),
        ("nacl:budget=512,seed=3", NACL(budget=512, seed=3)),
        ("expected-attention:covariance=false", ExpectedAttention(covariance=False)),
        ("streamingllm:ratio=0.5,window=none", StreamingLLM(ratio=0.5)),
    ],
)
def test_text_and_back(text, policy):
    assert policies.parse(text) == policy
    assert policies.parse(policies.format_policy(policy)) == policy
    assert policies.parse(policy) is policy


@pytest.mark.parametrize(
    "text, says",
    [
        ("lagvk", "did you mean 'lagkv'"),
        ("h3o", "known are"),
        ("lagkv:ration=0.5", "did you mean 'ratio'"),
        ("lagkv:ratio=half", "ratio='half'"),
        ("lagkv:ratio", "no value"),
        ("lagkv:", "ends where its options begin"),
        (" full : ", "ends where its options begin"),
        ("razor:inner=lagkv:", "has no option|ends where its options begin"),
        ("lagkv:ratio=0.5,ratio=0.6", "twice"),
        ("lagkv:lag=12.5", "lag='12.5'"),
        ("full:ratio=0.5", "takes none"),
        ("lagkv:variant=lgg", "variant"),
        (7, "not a policy"),
    ],
)
def test_bad_text_is_one_sentence_with_a_suggestion(text, says):
    with pytest.raises(UsageError, match=says) as error:
        policies.parse(text)
    assert "\n" not in str(error.value)


def test_policies_without_parentheses_are_nested_a_few_deep_too():
    with pytest.raises(UsageError, match="nested more than 8 deep"):
        policies.parse("razor:inner=" * 500 + "full")


def test_policies_are_static_arguments():
    for cls in policies.registry().values():
        policy = cls()
        assert hash(policy) == hash(cls()) and policy == cls()
        assert cls.__doc__ and dataclasses.is_dataclass(policy)


def test_registering_a_name_twice_is_refused():
    @dataclasses.dataclass(frozen=True)
    class Mine(policies.Policy):
        """A policy."""

    with pytest.raises(UsageError, match="already belongs"):
        policies.register("full", Mine)
    with pytest.raises(UsageError, match="not a policy"):
        policies.register("mine", object)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="already belongs to LagKV"):
        policies.register("LAG", Mine)
    for name in ("mine:ratio", "", "my policy", "mine\n", 10**5000, None):
        with pytest.raises(UsageError, match="is no name of a policy"):
            policies.register(name, Mine)  # type: ignore[arg-type]


def test_the_table_of_names_loads_no_jax():
    code = "import sys, kvjax.policies.names; sys.exit('jax' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], timeout=120, env={"PYTHONPATH": ":".join(sys.path)}).returncode
        == 0
    )


def test_type_checkers_know_the_classes_of_the_table():
    imports = [node for node in ast.walk(ast.parse(inspect.getsource(names))) if isinstance(node, ast.ImportFrom)]
    known = {node.names[0].asname: node.module for node in imports if node.module.startswith("kvjax.policies.")}
    assert known == names.CLASSES
    for name in names.CLASSES:
        assert getattr(policies, name) is getattr(kvjax, name)
        assert name in policies.__all__ and name in kvjax.__all__


def test_type_checkers_know_what_a_policy_of_ones_own_imports_and_nothing_else():
    imports = [node for node in ast.walk(ast.parse(inspect.getsource(policies))) if isinstance(node, ast.ImportFrom)]
    known = {alias.name for node in imports for alias in node.names} - {"*", "annotations", "CLASSES"}
    typing = {"TYPE_CHECKING", "Any"}
    assert known - typing | set(policies.base.__all__) | names.CLASSES.keys() == set(policies.__all__)
    for name in policies.__all__:
        assert getattr(policies, name) is not None


def test_a_long_list_of_names_ends_at_a_whole_one():
    with pytest.raises(UsageError) as error:
        policies.parse("h3o")
    sentence = str(error.value)
    assert "..." not in sentence and " more (see" in sentence and "known are full, streamingllm, lagkv" in sentence
    assert listed(["ab", "cd", "ef"], most=6) == "ab, cd and 1 more" and listed(["ab", "cd"], most=6) == "ab, cd"


@pytest.mark.parametrize(
    "text", ["lagkv:ratio=0.5,", "lagkv:,ratio=0.5", "lagkv:ratio=0.5,,lag=64", "razor:inner=lagkv(lag=64,)"]
)
def test_an_option_that_is_missing_between_commas_is_refused(text):
    with pytest.raises(UsageError, match="An option of LagKV is missing"):
        policies.parse(text)
