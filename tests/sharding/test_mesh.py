"""Meshes as text, who holds what, and requests that make no sense."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
import toys

import kvjax
from kvjax.cache.packing import store
from kvjax.cache.page_sharding import PageSharding
from kvjax.cache.pool import empty_layer
from kvjax.cache.pool_sharding import shard, unshard
from kvjax.policies import parse
from kvjax.policies.fixed import fixed
from kvjax.policies.page_capacities import page_capacities
from kvjax.policies.window_layers import for_model
from kvjax.runtime.programs import Programs
from kvjax.sharding.mesh import Mesh, parse_mesh
from kvjax.sharding.partition import Partition


def test_text_forms():
    assert parse_mesh("data=4,model=2") == Mesh(4, 2) == parse_mesh(" model=2, data=4 ")
    assert parse_mesh("model=8") == Mesh(1, 8) and str(Mesh(1, 8)) == "data=1,model=8"
    assert parse_mesh(None) is None and parse_mesh(Mesh(2)) == Mesh(2)


@pytest.mark.parametrize("text", ["data", "data=0", "data=x", "rows=2", "data=2,data=2", "data=-1", 3, "model=1.5"])
def test_other_forms_are_refused_in_a_sentence(text):
    with pytest.raises(kvjax.UsageError) as caught:
        parse_mesh(text)
    assert "\n" not in str(caught.value)


def test_too_few_devices_are_refused_before_anything_is_read():
    with pytest.raises(kvjax.UsageError, match=r"needs 512 devices and this machine has"):
        kvjax.load("/nowhere/model.gguf", mesh="data=512")
    with pytest.raises(kvjax.UsageError, match=r"needs 4 devices; 1 were given"):
        Mesh(2, 2, devices=(object(),))
    with pytest.raises(kvjax.UsageError, match="give a tuple of JAX's devices"):
        Mesh(devices=10**5000)
    with pytest.raises(kvjax.UsageError, match="on one device"):
        toys.tiny_model().on(None)


@pytest.mark.parametrize(
    "model, heads, parts", [(8, 8, 8), (8, 4, 4), (2, 3, 1), (6, 3, 3), (6, 2, 2), (12, 8, 4), (4, 1, 1)]
)
def test_heads_are_sharded_over_as_many_devices_as_divide_them(model, heads, parts):
    mesh = Mesh(1, model)
    assert mesh.parts(mesh.axes_dividing(heads)) == parts
    config = toys.tiny_config(num_heads=heads, num_kv_heads=heads)
    (group,) = Partition(mesh, config, kvjax.Full()).groups(0)
    assert (group.sharding.head_parts, group.sharding.page_parts, group.count) == (
        parts,
        model // parts,
        heads // parts,
    )


def test_groups_of_retrieval_heads_are_sharded_apart():
    config = toys.tiny_config(num_heads=8, num_kv_heads=8)
    part = Partition(Mesh(1, 4), config, parse("razor:heads=0.1+0.6,budget=64"))
    protected, others = part.groups(0)
    assert protected.heads == (1, 6) and others.heads == (0, 2, 3, 4, 5, 7)
    assert [(group.sharding.head_parts, group.sharding.page_parts) for group in (protected, others)] == [(2, 2), (2, 2)]
    (every,) = part.groups(1)
    assert every.sharding.head_parts == 4
    # A device's three and a half heads: half of each of two, and half of each of six others'.
    assert part.config_of(0).num_kv_heads == 1 + 3 and part.config_of(1).num_kv_heads == 2


@pytest.mark.parametrize("protected", ["0.0", "0.1+0.6", "0.0+0.1+0.2", "0.0+0.2+0.3+0.5+0.7"])
@pytest.mark.parametrize("model", [2, 4, 8])
def test_uneven_heads_are_balanced(protected, model):
    """Each device holds at most a tenth more than an even share, whatever a layer protects."""
    config = toys.tiny_config(num_heads=16, num_kv_heads=8, head_dim=64, max_position=65536)
    asked = {"prompt_tokens": 32768, "batch": 4, "policy": f"razor:heads={protected}", "memory_limit": 1 << 50}
    made = kvjax.plan(config, mesh=Mesh(1, model), **asked)
    assert 1.0 <= made.cache_over_even <= 1.1


@pytest.mark.parametrize("policy", ["snapkv", "adaptive", "adaptive:inner=h2o", "razor:heads=0.0"])
@pytest.mark.parametrize("heads", [3, 4])
def test_capacities_are_of_the_heads_that_a_device_has_beside_windows(policy, heads):
    """Heads that share a layer's slots are not divided, and those of a window's ring are."""
    config = toys.tiny_config(num_heads=2 * heads, num_kv_heads=heads, windows=(8, None))
    part = Partition(Mesh(1, 2), config, for_model(parse(policy), config))
    found = page_capacities(part.local_policy, part.local_config, 64, 16)
    wanted = [sum(group.count for group in part.groups(layer)) for layer in range(2)]
    assert [len(pages) for pages in found] == wanted
    assert [part.local_policy.heads_of(part.local_config, layer) for layer in range(2)] == wanted


@pytest.mark.parametrize("policy", ["adaptive:inner=keydiff", "adaptive:inner=keydiff,scope=model"])
def test_rows_beside_a_chosen_context_are_divided_as_it_is(policy):
    """Attention merges a head's two pools, so a device has the same heads of both: all, and part of their pages."""
    config, chooser = toys.tiny_config(num_heads=8, num_kv_heads=4), parse(policy)
    (chosen,), (own,) = (Partition(Mesh(1, 2), config, each).groups(0) for each in (chooser, fixed(chooser)))
    assert (chosen.count, chosen.sharding.page_parts) == (own.count, own.sharding.page_parts) == (4, 2)


def test_a_plan_is_of_one_device():
    config = toys.tiny_config(num_heads=8, num_kv_heads=4, vocab_size=264, max_position=8192)
    alone = kvjax.plan(config, prompt_tokens=4096, batch=8)
    shared = kvjax.plan(config, prompt_tokens=4096, batch=8, mesh="data=4,model=2")
    assert shared.mesh == "data=4,model=2" and "each device" in shared.table()
    assert shared.full_cache_bytes == alone.full_cache_bytes // 8
    assert shared.cache_bytes * 8 == pytest.approx(alone.cache_bytes, rel=0.01)
    norms = sum(2 * 32 for _ in range(config.num_layers)) * 4 + 32 * 4
    assert shared.weights_bytes == (alone.weights_bytes - norms) // 2 + norms
    # A batch is padded as on one device, and then to whole rows of devices; that is said.
    padded = kvjax.plan(config, prompt_tokens=4096, batch=5, mesh="data=4,model=2")
    assert padded.cache_bytes == shared.cache_bytes and padded.cache_over_even == pytest.approx(1, rel=0.01)
    wider = kvjax.plan(config, prompt_tokens=4096, batch=5, mesh="data=3,model=2")
    assert (padded.rows, wider.rows) == (8, 9) and wider.cache_over_even == pytest.approx(9 / 8, rel=0.01)
    assert all(f"padded to {plan.rows} rows" in plan.table() for plan in (padded, wider))
    assert kvjax.plan(config, prompt_tokens=4096, batch=5, mesh="data=3", policy="round:watershed=1").rows == 9
    assert [Programs(Mesh(3, 2), config, exact=exact).rows(5) for exact in (False, True)] == [9, 6]
    with pytest.raises(kvjax.DoesNotFit, match="on each device"):
        kvjax.plan(config, prompt_tokens=4096, batch=8, mesh="data=4,model=2", memory_limit=shared.total_bytes - 1)


@pytest.mark.parametrize("storage", ["model", "int8"])
def test_sharded_pages_come_back(storage):
    from kvjax.cache.quantisation import parse_storage

    rng = np.random.default_rng(0)
    k, v = (jnp.asarray(rng.normal(size=(2, 4, 200, 8)), jnp.float32) for _ in "kv")
    pool = empty_layer(2, (8, 8, 8, 8), 8, jnp.float32, marks=("position",), storage=parse_storage(storage))
    pool = store(pool, k, v, jnp.full((2, 4), 200, jnp.int32), pool.pages)
    sharding = PageSharding(("model0",), ("model1",), 2, 2)
    there = shard(pool, sharding)
    assert there.sharding == sharding
    # Device (0, 1) holds the odd pages of the first two heads.
    count = 2 * 8 // 2
    np.testing.assert_array_equal(there.kv.v[:, count : 2 * count], pool.kv.v[:, 1:16:2])
    back = unshard(there)
    for one, other in zip(back.kv.k, pool.kv.k, strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(back.kv.v, pool.kv.v)
