"""What a decode step on a mesh sends between devices, and that its cache is updated in place."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.devices import printed

from kvjax.sharding.hlo_collectives import collectives


@pytest.fixture(scope="module")
def steps():
    by_head, paged = printed(Path(__file__).with_name("decode_step.py"), "full/4", "razor:heads=0.0,budget=64/3")
    return {"by_head": by_head, "paged": paged}


@pytest.mark.parametrize("name", ["by_head", "paged"])
def test_no_collective_is_of_the_caches_size(steps, name):
    step = steps[name]
    assert {"all-reduce", "all-gather"} >= {kind for kind, *_ in step["collectives"]}
    assert step["collectives"], "a step with none would be one whose devices do not work together"
    # Per layer, of which there are two; the largest is the logits of two rows, 264 numbers each.
    largest = max(size for *_, size in step["collectives"])
    assert largest <= 2 * 264 * 4 < step["pool_bytes"] / 2 / 10, step["collectives"]


def test_heads_that_divide_need_two_sums_a_layer(steps):
    """Attention's and the MLP's, beside the embedding's and the agreement to go on."""
    sums = [each for each in steps["by_head"]["collectives"] if each[0] == "all-reduce"]
    in_layers = sum(times for _, array, times, _ in sums if array.startswith("f32"))
    assert in_layers == 2 * 2 + 1, sums
    assert [each[0] for each in steps["by_head"]["collectives"]].count("all-gather") == 1  # the logits


@pytest.mark.parametrize("name", ["by_head", "paged"])
def test_pools_are_updated_in_place_and_bytes_are_the_plans(steps, name):
    step = steps[name]
    assert step["aliased_bytes"] >= step["pool_bytes"]
    assert step["planned_bytes"] <= step["argument_bytes"] <= 1.04 * step["planned_bytes"]


def test_collectives_are_read_from_a_programs_text():
    text = """
      %a = f32[2,8]{1,0} all-reduce(f32[2,8]{1,0} %x), replica_groups={}
      %b = (f32[4]{0}, bf16[64]{0}) all-gather-start(f32[4]{0} %x, bf16[32]{0} %y), dimensions={0}
      %c = bf16[64]{0} all-gather-done(%b)
      %d = f32[2,8]{1,0:T(8,128)} all-reduce(f32[2,8]{1,0} %a), to_apply=%sum
      %e = f32[4]{0} add(f32[4]{0} %x, f32[4]{0} %x)
    """
    assert collectives(text) == [("all-gather", "bf16[64]", 1, 128), ("all-reduce", "f32[2,8]", 2, 64)]
