"""What a prompt read onto a shared context takes is planned: XLA's own count of it is never above."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest
import toys

from kvjax.cache.cache import take_rows
from kvjax.cache.quantisation import parse_storage
from kvjax.engine.common_context import CommonContext
from kvjax.engine.engine_sizes import engine_sizes
from kvjax.memory_needs import shared_copy_bytes
from kvjax.model.decoder import abstract_decoder
from kvjax.planning.request_shape import RequestShape
from kvjax.policies import parse
from kvjax.policies.fixed import fixed
from kvjax.runtime.programs import PREFILL_ONTO
from kvjax.runtime.share_context import share_chosen
from kvjax.sharding.compile import OneDevice

CONTEXT, ROWS, QUESTION = 4096, 4, 64


CONFIG = toys.tiny_config(
    num_layers=2, num_heads=8, num_kv_heads=8, head_dim=32, hidden_size=64, intermediate_size=64, max_position=8192
)


def read_once(text, held):
    """A row that holds nothing of its own, and what was chosen of a context."""
    read = OneDevice(CONFIG, parse(text)).empty(1, CONTEXT, 256, jnp.float32, held)
    return share_chosen(OneDevice(CONFIG, fixed(parse(text))), read, prompt_capacity=CONTEXT, dtype=jnp.float32)


@pytest.mark.filterwarnings("ignore:Some donated buffers")  # nothing of the cache is kept where only the size is asked
@pytest.mark.parametrize(
    ("text", "storage"),
    [
        ("adaptive:ratio=0.25,inner=keydiff", None),
        ("adaptive:ratio=0.25,inner=keydiff,scope=model", "int8"),
        ("snapkv:ratio=0.25", "int8"),
    ],
)
def test_questions_onto_a_context_take_no_more_than_planned(text, storage):
    policy, held = fixed(parse(text)), parse_storage(storage)

    def made():
        row, context = read_once(text, held)
        return take_rows(row, [0] * ROWS).replace(context=take_rows(context, [0]), policy=policy)

    cache = jax.eval_shape(made)
    context_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache.context))
    shape = RequestShape(
        config=CONFIG,
        policy=policy,
        batch=ROWS,
        prompt=QUESTION,
        new=1,
        dtype=jnp.dtype("float32"),
        storage=held,
        context=CONTEXT,
        held_context=context_bytes,
    )
    size = shape.sizes(None, exact=True)[0]
    counts = (jax.ShapeDtypeStruct((ROWS,), jnp.int32),) * 2
    ids = jax.ShapeDtypeStruct((ROWS, size.own_capacity), jnp.int32)
    sizes = dataclasses.asdict(size)
    program = PREFILL_ONTO.lower(
        OneDevice(CONFIG, policy),
        abstract_decoder(CONFIG),
        cache,
        ids,
        *counts,
        **{name: sizes[name] for name in ("prompt_capacity", "new_capacity", "own_capacity")},
    ).compile()
    taken = program.memory_analysis().temp_size_in_bytes
    copied = shared_copy_bytes(CONFIG, policy, CONTEXT, jnp.dtype("float32"), held)
    assert copied / 2 < taken <= shape.plan(size).prefill_peak_bytes


def test_an_engine_over_a_context_counts_them_too():
    text, held, dtype = "adaptive:ratio=0.25,inner=keydiff", parse_storage(None), jnp.dtype("float32")
    row = jax.eval_shape(lambda: read_once(text, held)[0])
    asked = {"slots": ROWS, "prompt_tokens": QUESTION, "new_tokens": 16, "memory_limit": None, "mesh": None}
    context = CommonContext(row, seen=CONTEXT, shared=CONTEXT, nbytes=0)
    policy = fixed(parse(text))
    sizes = engine_sizes(CONFIG, policy, held, **asked, dtype=dtype, context=context)
    assert sizes.working_bytes > shared_copy_bytes(CONFIG, policy, CONTEXT, dtype, held)
