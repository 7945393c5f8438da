"""Tests of many cases, each of which compiles for seconds: the default suite runs some, ``-m slow`` the others."""

from __future__ import annotations

import collections

import pytest

#: Cases that the default suite runs of each, spread evenly over all.
SAMPLED = {
    "bench/test_shapes.py::test_every_policy_runs_on_the_share_it_is_given": 2,
    "batch/test_processes.py::test_a_launcher_tells_who_there_is": 1,
    "cache/test_layout.py::test_every_layout_holds_the_same": 2,
    "engine/test_memory.py::test_rows_are_inserted_in_place_and_no_other_row_is_copied": 3,
    "engine/test_memory.py::test_what_was_planned_is_what_is_there": 1,
    "kernels/test_decode_mosaic_gpu.py::test_lengths_around_every_boundary": 2,
    "kernels/test_mass_tpu.py::test_blocks_of_several_parts": 2,
    "kernels/test_prefill_tpu.py::test_the_orders_of_chips_with_large_matrix_units": 1,
    "model/test_families_policies.py::test_a_policy_answers": 3,
    "model/test_quantised.py::test_a_model_is_nearly_that_of_floats": 1,
    "policies/test_evicting.py::test_a_row_of_a_batch_is_the_row_alone": 1,
    "policies/test_evicting.py::test_a_budget_that_covers_everything_is_the_full_cache": 1,
    "rounds/test_conversation.py::test_an_inner_policy_compresses_each_round_by_itself": 1,
    "runtime/test_observing.py::test_rows_in_turns_are_what_all_rows_are": 2,
    "runtime/test_shared_context.py::test_answers_are_those_of_copies": 2,
    "runtime/test_shared_context.py::test_policies_that_choose_again_copy": 1,
    "test_context.py::test_questions_get_the_answers_of_context": 2,
    "test_generation.py::test_a_row_of_a_batch_is_the_row_alone_whenever_the_others_end": 2,
    "test_generation.py::test_growing_past_the_first_room_changes_nothing": 1,
    "test_saving.py::test_a_loaded_cache_goes_on_as_the_saved_one": 1,
}


def mark_the_others_slow(items: list[pytest.Item]) -> None:
    """Mark cases beyond those that the default suite runs."""
    groups = collections.defaultdict(list)
    for item in items:
        if not item.get_closest_marker("slow"):
            groups[item.nodeid.partition("[")[0].removeprefix("tests/")].append(item)
    for name, count in SAMPLED.items():
        cases = groups.get(name, [])
        kept = {i * len(cases) // count for i in range(count)}
        for i, item in enumerate(cases):
            if i not in kept:
                item.add_marker(pytest.mark.slow)
