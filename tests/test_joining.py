"""``kvjax.concatenate``: rows that were kept apart go on as one batch."""

from __future__ import annotations

import jax
import pytest

import kvjax

ROUNDS = "round:watershed=1,top=0.4"
SAID = ("Of the sea and of what lives in it.", "Of ships.")
ASKED = ("And?", "More of them, and of who built them.")


@pytest.fixture(scope="module")
def talks(tiny_model):
    """Two users' conversations."""
    return [kvjax.generate(tiny_model, text, policy=ROUNDS, max_new_tokens=5).cache for text in SAID]


def test_conversations_of_several_users_go_on_as_one_batch(tiny_model, talks):
    both = kvjax.concatenate([talks[0], talks[1].to_host()])
    assert isinstance(both, kvjax.Conversation) and both.batch == 2 and both.asked == (1, 1)
    assert both.rounds[0][0].upper is talks[0].rounds[0][0].upper  # shared, not copied
    # A list of conversations, whose rows are known to answer as they do alone, is the same batch.
    listed, joined = (kvjax.generate(tiny_model, list(ASKED), cache=c, max_new_tokens=5) for c in (talks, both))
    for one, other in zip(listed, joined, strict=True):
        assert one.tokens == other.tokens and one.stats.rounds == other.stats.rounds


def test_a_parked_cache_joins_one_on_the_device(tiny_model):
    chat = kvjax.Chat(tiny_model, max_new_tokens=2)
    chat.send("Hello")
    here = chat.cache
    chat.park()
    both = kvjax.concatenate([chat.cache, here])
    assert both.batch == 2 and {leaf.sharding.memory_kind for leaf in jax.tree.leaves(both)} == {"device"}


def test_what_cannot_be_one_batch_is_one_sentence(tiny_model, talks):
    plain = kvjax.generate(tiny_model, "x", max_new_tokens=0).cache
    gone = kvjax.generate(tiny_model, "x", max_new_tokens=0).cache
    kvjax.generate(tiny_model, "y", cache=gone, consume_cache=True, max_new_tokens=0)
    other = talks[1].replace(policy=kvjax.RoundAttention(watershed=1))
    for given, says in (
        ([], "at least one"),
        ([plain, talks[0]], "Caches and conversations of rounds cannot be one batch"),
        ([talks[0], other], "must share their policy"),
        ([talks[0], "talk"], "a str was given"),
        ([plain, gone], "consumed by an earlier call"),
    ):
        with pytest.raises(kvjax.UsageError, match=says):
            kvjax.concatenate(given)
