"""Conversations on disk: what is loaded goes on as what was saved, and nothing half-written is ever found."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys
from flax import nnx
from orbax.checkpoint import v1 as ocp

import kvjax
from kvjax.cache.layout import Layout
from kvjax.checkpoints.digest import weights_digest
from kvjax.model.params import logical
from kvjax.policies import registry
from kvjax.policies.base import Policy
from kvjax.saving import canonical, description
from kvjax.saving import store as store_module

PROFILE = Path(__file__).parents[1] / "configs/profiles/smollm2-135m-instruct.yaml"
RNG = np.random.default_rng(4)
PROMPTS = [RNG.integers(0, 256, size).tolist() for size in (70, 33)]
LATER = [RNG.integers(0, 256, size).tolist() for size in (9, 21)]

POLICIES = {
    "streamingllm": kvjax.StreamingLLM(budget=24, sink=4),  # a ring, which goes on where it was
    "lagkv": kvjax.LagKV(ratio=0.25, lag=16, sink=4),  # counters of its own
    "h2o": kvjax.H2O(budget=24),  # a score a slot
    "razor": kvjax.RazorAttention(heads=((0, 1), (1, 0)), budget=24),  # pools of unlike heads, a mean, its log N
    "expected_attention": kvjax.ExpectedAttention(budget=24),  # moments of queries
}
STORED = [
    ("expected_attention", "model"),
    ("lagkv", "int8"),
    ("razor", "int8"),
    *(pytest.param(name, "model", marks=pytest.mark.slow) for name in ("streamingllm", "h2o")),
]


def leaves_equal(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def outputs_of(lm, cache):
    return [(out.tokens, out.stats.retained) for out in kvjax.generate(lm, LATER, cache=cache, max_new_tokens=6)]


@pytest.mark.parametrize("changes", [{}, {"tie_embeddings": False}, {"mlp": "gelu", "mlp_bias": True}])
def test_weights_are_known_whichever_way_round_they_are_stored(changes):
    params, seen = toys.tiny_model(**changes).params, hashlib.sha256()
    for param in jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, nnx.Variable)):
        matrix, inputs = logical(param), param.get_metadata("inputs", 1)
        if param[...].ndim > 1:
            matrix = matrix.reshape(math.prod(matrix.shape[:inputs]), -1)[:2, :64]
        seen.update(np.asarray(matrix).astype(jnp.bfloat16).tobytes())
    assert weights_digest(params) == seen.hexdigest()[:32]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "storage"), STORED)
def test_a_loaded_cache_goes_on_as_the_saved_one(tiny_model, tmp_path, name, storage):
    outs = kvjax.generate(tiny_model, PROMPTS, policy=POLICIES[name], storage=storage, max_new_tokens=6)
    cache = kvjax.concatenate([out.cache for out in outs])
    kvjax.save_cache(tmp_path / "talk", cache, tiny_model)
    loaded = kvjax.load_cache(tmp_path / "talk", tiny_model)
    assert loaded.policy == cache.policy and loaded.storage == cache.storage
    assert loaded.nbytes == cache.nbytes and loaded.live_nbytes == cache.live_nbytes
    counts = canonical.counts_of(cache)
    assert canonical.counts_of(loaded) == counts
    leaves_equal(canonical.canonical(loaded, counts), canonical.canonical(cache, counts))
    assert outputs_of(tiny_model, loaded) == outputs_of(tiny_model, cache)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [Layout("stacked", 16, 128)], ids=str)
def test_what_is_saved_knows_no_layout(tiny_model, tmp_path, layout):
    policy = POLICIES["razor"]
    outs = [
        kvjax.generate(tiny_model, PROMPTS[0], policy=policy, storage=stored, max_new_tokens=0)
        for stored in (None, kvjax.Storage(layout=layout))
    ]
    plain, other = (out.cache for out in outs)
    assert plain.page_size != other.page_size
    counts = canonical.counts_of(plain)
    leaves_equal(canonical.canonical(other, counts), canonical.canonical(plain, counts))
    kvjax.save_cache(tmp_path / "talk", other, tiny_model)
    loaded = kvjax.load_cache(tmp_path / "talk", tiny_model)
    assert loaded.storage == plain.storage
    follow = [kvjax.generate(tiny_model, LATER[0], cache=cache, max_new_tokens=6) for cache in (loaded, plain)]
    assert follow[0].tokens == follow[1].tokens and follow[0].stats.retained == follow[1].stats.retained


def test_a_chat_is_saved_and_goes_on(tiny_model, tmp_path):
    chat = kvjax.Chat(tiny_model, policy="lagkv:ratio=0.5,lag=16,sink=4", max_new_tokens=6)
    with pytest.raises(kvjax.UsageError, match="nothing to save before the first turn"):
        chat.save(tmp_path / "talk")
    chat.send("Tell me of the sea, and of what lives in it, and of ships.")
    chat.save(tmp_path / "talk")
    again = kvjax.Chat.load(tmp_path / "talk", tiny_model, max_new_tokens=6)
    assert again.policy == chat.policy
    assert again.send("And?").tokens == chat.send("And?").tokens
    chat.save(tmp_path / "talk")  # a later turn takes the place of the earlier
    third = kvjax.Chat.load(tmp_path / "talk", tiny_model, max_new_tokens=6)
    assert third.send("More.").tokens == again.send("More.").tokens
    assert [item.name for item in (tmp_path / "talk").iterdir()] == ["1"]


@pytest.mark.slow
@pytest.mark.parametrize("storage", ["model", "int8"])
def test_a_conversation_of_rounds_is_saved_and_goes_on(tiny_model, tmp_path, storage):
    policy = kvjax.RoundAttention(watershed=1, strategy="topk", top=0.4)
    chat = kvjax.Chat(tiny_model, policy=policy, storage=storage, system="Be brief.", max_new_tokens=6)
    for message in ("Of the sea.", "And of ships, which are many, and large.", "Of fish?"):
        chat.send(message)
    chat.park()
    chat.save(tmp_path / "talk")
    again = kvjax.Chat.load(tmp_path / "talk", tiny_model, max_new_tokens=6)
    assert again.policy == policy and isinstance(again.cache, kvjax.Conversation)
    assert again.cache.host_nbytes == chat.cache.host_nbytes and again.cache.asked == (3,)
    for part in again.cache.rounds[0]:
        assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(part.upper)} == {"pinned_host"}
    goes_on, would = again.send("More?"), chat.send("More?")
    assert goes_on.tokens == would.tokens and goes_on.stats.rounds == would.stats.rounds


def test_every_policy_comes_back_from_json():
    for name, cls in registry().items():
        if not cls.__module__.startswith("kvjax"):
            continue
        sized = "budget" in {field.name for field in dataclasses.fields(cls)}
        policy = POLICIES.get(name) or (cls(budget=64) if sized else cls())
        assert description.policy_from_json(description.policy_to_json(policy)) == policy
    nested = kvjax.Razor(inner=kvjax.LagKV(ratio=0.5, lag=32), profile=PROFILE)
    assert description.policy_from_json(description.policy_to_json(nested)) == nested


def saved(tiny_model, folder: Path) -> Path:
    cache = kvjax.generate(tiny_model, PROMPTS[0], max_new_tokens=1).cache
    kvjax.save_cache(folder, cache, tiny_model)
    return folder


@pytest.mark.parametrize("policy", ["full", "round:watershed=1"])
def test_what_does_not_fit_is_refused_before_anything_is_allocated(tiny_model, tmp_path, monkeypatch, policy):
    cache = kvjax.generate(tiny_model, PROMPTS[0], policy=policy, max_new_tokens=1).cache
    kvjax.save_cache(tmp_path / "talk", cache, tiny_model)
    # Beside the weights there are the pages, and for a moment what was read: of a CPU's memory, rounds too.
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(tiny_model.params))
    held = cache.nbytes if policy == "full" else cache.lower.nbytes
    with monkeypatch.context() as patched:
        patched.setattr(store_module, "_zeros", lambda _: pytest.fail("something was allocated"))
        for limit in (1000, weights + held + 1000):
            with pytest.raises(kvjax.DoesNotFit, match=r"To load the conversation at .*talk takes .* of weights, and"):
                kvjax.Chat.load(tmp_path / "talk", tiny_model, memory_limit=limit)
    kept = cache.nbytes + (0 if policy == "full" else cache.host_nbytes)
    loaded = kvjax.load_cache(tmp_path / "talk", tiny_model, memory_limit=weights + held + kept)
    assert int(loaded.seen[0]) == 70


def test_another_model_is_refused(tiny_model, tmp_path):
    folder = saved(tiny_model, tmp_path / "talk")
    with pytest.raises(kvjax.UsageError, match="saved with the model 'tiny', and the weights of 'tiny' are others"):
        kvjax.load_cache(folder, toys.tiny_model(seed=9))
    with pytest.raises(kvjax.UsageError, match="another shape"):
        kvjax.load_cache(folder, toys.tiny_model(num_layers=1))
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.float16), tiny_model.params)
    with pytest.raises(kvjax.UsageError, match=r"in float32, and .* in float16 are others; load it with dtype"):
        kvjax.load_cache(folder, dataclasses.replace(tiny_model, params=params))


def test_a_later_version_and_an_unknown_policy_are_refused(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr(store_module, "VERSION", description.VERSION + 1)
    folder = saved(tiny_model, tmp_path / "later")
    monkeypatch.undo()
    with pytest.raises(kvjax.UsageError, match="version 2 of the form; this one reads up to version 1"):
        kvjax.load_cache(folder, tiny_model)

    @dataclasses.dataclass(frozen=True)
    class Mine(Policy):
        pass

    cache = kvjax.generate(tiny_model, PROMPTS[0], policy=Mine(), max_new_tokens=1).cache
    kvjax.save_cache(tmp_path / "mine", cache, tiny_model)
    with pytest.raises(kvjax.UsageError, match="policy 'Mine', which is not known here"):
        kvjax.load_cache(tmp_path / "mine", tiny_model)


def test_folders_of_something_else_are_left_alone(tiny_model, tmp_path):
    cache = kvjax.generate(tiny_model, PROMPTS[0], max_new_tokens=1).cache
    (tmp_path / "notes.txt").write_text("mine")
    for path in (tmp_path, tmp_path / "notes.txt"):
        with pytest.raises(kvjax.UsageError, match="something else than a saved conversation"):
            kvjax.save_cache(path, cache, tiny_model)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    with pytest.raises(kvjax.UsageError, match="There is no saved conversation at"):
        kvjax.load_cache(tmp_path / "none", tiny_model)
    (tmp_path / "empty").mkdir()
    with pytest.raises(kvjax.UsageError, match="holds no whole one"):
        kvjax.load_cache(tmp_path / "empty", tiny_model)


def test_a_damaged_folder_is_one_sentence(tiny_model, tmp_path):
    folder = saved(tiny_model, tmp_path / "talk")
    (found,) = folder.rglob("state/_METADATA")
    found.write_text('{"tree_metadata": ')
    with pytest.raises(kvjax.KvjaxError, match="talk is damaged"):
        kvjax.load_cache(folder, tiny_model)


def test_a_bit_that_changed_on_the_disk_is_noticed(tiny_model, tmp_path):
    folder = saved(tiny_model, tmp_path / "talk")
    files = sorted(folder.rglob("ocdbt.process_0/d/*"), key=lambda file: file.stat().st_size)
    content = bytearray(files[-1].read_bytes())  # keys or values, of which Orbax keeps no checksum
    content[len(content) // 2] ^= 0x10
    files[-1].write_bytes(content)
    with pytest.raises(kvjax.KvjaxError, match="talk is damaged"):
        kvjax.load_cache(folder, tiny_model)


def test_numbered_folders_of_others_are_left_alone(tiny_model, tmp_path):
    cache = kvjax.generate(tiny_model, PROMPTS[0], max_new_tokens=1).cache
    (tmp_path / "photos" / "2023").mkdir(parents=True)
    with ocp.training.Checkpointer(tmp_path / "training") as training:
        training.save(100, {"w": np.ones(4)})
    for name, number in (("photos", "2023"), ("training", "100")):
        for call in (kvjax.save_cache, lambda path, _, lm: kvjax.load_cache(path, lm)):
            with pytest.raises(kvjax.UsageError, match="something else than a saved conversation"):
                call(tmp_path / name, cache, tiny_model)
        assert [item.name for item in (tmp_path / name).iterdir()] == [number]


def test_a_folder_that_cannot_be_written_is_refused_before_orbax_begins(tiny_model, tmp_path, monkeypatch):
    folder = saved(tiny_model, tmp_path / "talk")
    cache = kvjax.load_cache(folder, tiny_model)

    def refuse(dir):
        raise PermissionError(13, "Permission denied", str(dir))

    with monkeypatch.context() as patched:  # a mode says nothing to a superuser
        patched.setattr(store_module.tempfile, "TemporaryFile", refuse)
        patched.setattr(ocp.training, "Checkpointer", lambda *_, **__: pytest.fail("Orbax began"))
        with pytest.raises(kvjax.KvjaxError, match=r"cannot be written to .*talk: Permission denied\.$"):
            kvjax.save_cache(folder, cache, tiny_model)
    assert int(kvjax.load_cache(folder, tiny_model).seen[0]) == 70


def test_what_can_be_no_folder_is_refused(tiny_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cache = kvjax.generate(tiny_model, PROMPTS[0], max_new_tokens=1).cache
    for path in ("x" * 300, "a\0b", "gs://bucket/talk"):
        with pytest.raises(kvjax.KvjaxError, match=r"folder|written|shorter|another|name one"):
            kvjax.save_cache(path, cache, tiny_model)
        with pytest.raises(kvjax.UsageError, match=r"folder|no saved|shorter|another|name one"):
            kvjax.load_cache(path, tiny_model)
    assert not list(tmp_path.iterdir())
    with pytest.raises(kvjax.UsageError, match="The model is a str"):
        kvjax.load_cache(tmp_path, "smollm2-135m-instruct")
    with pytest.raises(kvjax.UsageError, match="leave policy= out"):
        kvjax.Chat.load(tmp_path, tiny_model, policy="full")


_KILLED = """
import sys, kvjax, toys
lm = toys.tiny_model()
cache = kvjax.generate(lm, list(range(200)), max_new_tokens=1).cache
cache = cache.replace(layers=cache.layers)
print("saving", flush=True)
while True:
    kvjax.save_cache(sys.argv[1], cache, lm)
    print("saved", flush=True)
"""


@pytest.mark.slow
def test_a_save_that_is_killed_leaves_the_one_before_it(tmp_path):
    lm = toys.tiny_model()
    folder = saved(lm, tmp_path / "talk")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"}
    child = subprocess.Popen(
        [sys.executable, "-c", _KILLED, str(folder)], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "saving\n"
    assert child.stdout.readline() == "saved\n"
    time.sleep(0.07)  # somewhere within the next ones
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    loaded = kvjax.load_cache(folder, lm)
    assert int(loaded.seen[0]) in (70, 200)
    again = kvjax.generate(lm, PROMPTS[0], max_new_tokens=1).cache
    kvjax.save_cache(folder, again, lm)
    counts = canonical.counts_of(again)
    leaves_equal(canonical.canonical(kvjax.load_cache(folder, lm), counts), canonical.canonical(again, counts))
    assert len(list(folder.iterdir())) == 1  # what the killed save left is gone
