"""Fixtures shared by all tests: the real default model where a user already has it, and a tiny random one."""

from __future__ import annotations

import os
import signal

# Before JAX is imported: modules that are collected and processes that tests start compile without optimisation too.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

import jax
import jaxtyping
import psutil
import pytest
from support import quick, sampled

# What tests compile is not kept in the user's cache folder, by processes that they start neither.
os.environ.setdefault("KVJAX_COMPILE_CACHE", "0")
# Tables in pipes are as wide as they ask for, whatever terminal the tests were started from.
os.environ.pop("COLUMNS", None)
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {quick.FLAGS}".strip()

# Shapes in signatures are checked wherever tests call these, before anything imports them.
jaxtyping.install_import_hook(
    [
        "kvjax.cache",
        "kvjax.calibrate",
        "kvjax.model.alibi",
        "kvjax.model.decoder",
        "kvjax.model.rope",
        "kvjax.policies",
        "kvjax.rounds",
        "kvjax.runtime",
    ],
    "shape_checks.checked",
)
quick.lower_in_one_context()
quick.collect_rarely()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whatever asks for the default model is marked ``model``; some cases of long tests are ``slow``."""
    sampled.mark_the_others_slow(items)
    for item in items:
        if "default_model" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.model)


#: Folders whose slow tests run their programs for long enough to be worth optimising them: training.
OPTIMISED = {"recall"}


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """What tests run takes less than what LLVM does for speed, the default model's answers of a few tokens too.

    An accelerator gets the programs that its users get.
    """
    trains = item.path.parent.name in OPTIMISED and item.get_closest_marker("slow") is not None
    optimised = trains or item.get_closest_marker("hardware") is not None
    jax.config.update("jax_disable_most_optimizations", not optimised)


@pytest.fixture(autouse=True)
def a_hub_that_is_never_asked(monkeypatch):
    """Stand-ins of the hub's client are called as where the hub can be reached, and no test looks whether it can."""
    monkeypatch.setattr("kvjax.checkpoints.hub.offline", dict)


@pytest.fixture(scope="module", autouse=True)
def bounded_memory():
    """Compiled programs are dropped between modules once the machine has less than a third of its memory left."""
    yield
    memory = psutil.virtual_memory()
    if memory.available < memory.total // 3:
        jax.clear_caches()


@pytest.fixture(scope="session", autouse=True)
def ctrl_c_arrives():
    """A shell's background job ignores SIGINT, and some tests press Ctrl-C."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def default_model():
    """SmolLM2-135M-Instruct in float32, once a session; nothing is downloaded here."""
    import kvjax
    from kvjax.checkpoints import hub

    if not hub.is_cached("smollm2-135m-instruct"):
        pytest.skip("the default model is not in the user's cache; run `kvjax fetch` once")
    return kvjax.load("smollm2-135m-instruct", dtype="float32", progress=False)


@pytest.fixture(scope="session")
def tiny_model():
    """A random two-layer model with a byte tokenizer."""
    import toys

    # Whatever test comes first: optimised, the same seed gives weights whose last bits differ.
    jax.config.update("jax_disable_most_optimizations", True)
    return toys.tiny_model()


@pytest.fixture
def forgotten_policies(monkeypatch):
    """Names that a test registers for its policies are unknown to the tests after it."""
    monkeypatch.setattr("kvjax.policies.parsing._REGISTERED", {})
