"""Page layouts: the same contents in each, and the same answers from each."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.cache.attention import decode_attention
from kvjax.cache.layout import COLUMNS, Layout, layout_of, platform_layout
from kvjax.cache.packing import resize, store
from kvjax.cache.pool import append_token, empty_layer, keys_and_values, read_slots
from kvjax.cache.quantisation import Storage
from kvjax.cache.regions import put_pages, take_pages
from kvjax.errors import UsageError
from pallas_kernels import dispatch

OTHERS = [Layout("columns", 16), Layout("stacked", 16), Layout("stacked", 16, 128), Layout("lanes", 64)]
each = pytest.mark.parametrize("layout", OTHERS, ids=str)


def through(layout: Layout, kind: str, pages: tuple[int, ...]):
    """Everything a pool can do, on the same rows; slots of a head are the same in every layout."""
    rng = np.random.default_rng(0)
    batch, heads, dim, tokens = 2, len(pages), 8, 70
    k, v = (jnp.asarray(rng.standard_normal((batch, heads, tokens, dim)), jnp.float32) for _ in range(2))
    runs = tuple(count * 64 // layout.page_size for count in pages)
    cache = empty_layer(batch, runs, dim, jnp.float32, marks=("score",), storage=Storage(kind, layout=layout))
    marks = {"score": jnp.asarray(rng.standard_normal((batch, heads, tokens)), jnp.float32)}
    cache = store(cache, k, v, jnp.asarray([[70, 33], [5, 64]]), runs, marks)
    k1, v1, q = (jnp.asarray(rng.standard_normal((batch, heads, dim)), jnp.float32) for _ in range(3))
    cache = append_token(cache, k1, v1, jnp.asarray([True, False]), {"score": jnp.ones((batch, heads))})
    region, first = take_pages(cache, jnp.int32(0), jnp.int32(3), 20)
    slot = first * layout.page_size + jnp.arange(region["v"].shape[1])[:, None]
    doubled = jnp.where((slot >= 3) & (slot < 23), 2.0, 1.0) * region["v"]
    cache = put_pages(cache, jnp.int32(0), first, {**region, "v": doubled})
    cache = resize(cache, tuple(2 * count for count in runs))
    read = read_slots(cache, jnp.asarray([[4, 30], [2, 60]]))
    attended, logits = decode_attention(q[:, :, None], cache, scale=0.3, with_logits=True)
    held = np.arange(max(cache.slots)) < np.asarray(cache.length)[..., None]
    k_rows, v_rows = keys_and_values(cache)
    kept = [np.where(held[..., None], np.asarray(x)[:, :, : held.shape[2]], 0) for x in (k_rows, v_rows)]
    assert logits.shape == (batch, sum(cache.pages), 1, layout.page_size)
    return [*kept, *read, attended, cache.length]


@each
@pytest.mark.parametrize("kind", ["model", "int8"])
@pytest.mark.parametrize("pages", [(2, 2), (3, 2)], ids=["uniform", "ragged"])
def test_every_layout_holds_the_same(layout, kind, pages):
    want, got = through(COLUMNS, kind, pages), through(layout, kind, pages)
    for a, b in zip(want, got, strict=True):
        b = np.asarray(b)[:, :, : a.shape[2]] if np.ndim(a) == 4 else np.asarray(b)
        np.testing.assert_allclose(b, np.asarray(a), atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy",
    ["lagkv:ratio=0.5,lag=16,sink=4", "full", "h2o:budget=40", "compensated:budget=40"],
)
def test_answers_do_not_depend_on_the_layout(policy, tiny_model):
    prompts = [np.random.default_rng(i).integers(0, 250, size).tolist() for i, size in enumerate((130, 20))]
    options = dict(policy=policy, max_new_tokens=40, stop_token_ids=(), repetition_penalty=1.5)
    plain = kvjax.generate(tiny_model, prompts, **options)
    chosen = Storage(layout=Layout("stacked", 16))
    laid = kvjax.generate(tiny_model, prompts, storage=chosen, **options)
    assert [output.tokens for output in laid] == [output.tokens for output in plain]
    assert layout_of(laid[0].cache.layers[0].kv) == chosen.layout and laid[0].cache.storage == chosen
    again = kvjax.generate(tiny_model, prompts[1], cache=laid[0].cache, max_new_tokens=5, stop_token_ids=())
    want = kvjax.generate(tiny_model, prompts[1], cache=plain[0].cache, max_new_tokens=5, stop_token_ids=())
    assert again.tokens == want.tokens
    made = kvjax.plan(tiny_model, prompt_tokens=130, batch=2, policy=policy, max_new_tokens=40, storage=chosen)
    assert made.cache_bytes >= sum(leaf.nbytes for leaf in jax.tree.leaves(laid[0].cache.layers)) * 2 - 4096
    assert all(count % 16 == 0 for heads in made.capacities for count in heads)


def test_the_platform_chooses(monkeypatch):
    assert platform_layout(64) == COLUMNS
    monkeypatch.setattr(dispatch, "platform", lambda: "tpu")
    assert platform_layout(64).kind == "lanes"
    assert platform_layout(80).lanes == 128 and platform_layout(128) == Layout("stacked", 128)
    for head_dim in (64, 80, 128, 256):  # a cache knows that its layout is the platform's
        assert layout_of(empty_layer(1, (1,), head_dim, jnp.bfloat16).kv) == platform_layout(head_dim)
    padded = empty_layer(1, (2,), 80, jnp.bfloat16)
    # What a TPU's lanes pad is allocated, and so it is counted.
    assert padded.slot_nbytes == 2 * 128 * 2 and padded.kv.shape[3] == 80
    monkeypatch.setattr(dispatch, "platform", lambda: "gpu")
    assert platform_layout(80) == Layout("stacked", 64)


def test_layouts_that_make_no_sense_are_refused():
    with pytest.raises(UsageError, match="layout is 'rows'"):
        Layout("rows")
    with pytest.raises(UsageError, match="page_size is 0"):
        Layout(page_size=0)
