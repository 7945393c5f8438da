"""Tests of many cases, each of which compiles for seconds: the default suite runs some, ``-m slow`` the others."""

from __future__ import annotations

import collections
import math

import pytest

#: Cases that the default suite runs of each, spread evenly over all: a number of them, or a part of them below 1. 0
#: leaves a test to ``-m slow``: another one, which is cheaper, notices the same faults.
SAMPLED: dict[str, float] = {
    "batch/test_processes.py::test_a_job_that_lost_process_0_goes_on_at_the_next_start": 0,
    "batch/test_processes.py::test_a_launcher_tells_who_there_is": 0,
    "bench/test_shapes.py::test_every_policy_runs_on_the_share_it_is_given": 2,
    "bench/test_start.py::test_a_conversation_and_random_requests_are_counted": 0,
    "cache/test_layout.py::test_answers_do_not_depend_on_the_layout": 0,
    "cache/test_layout.py::test_every_layout_holds_the_same": 2,
    "checkpoints/test_quantised_families.py::test_numbers_are_those_of_the_rounded_floats": 0.5,
    "checkpoints/test_weights.py::test_loading_takes_no_second_copy": 2,
    "checkpoints/test_weights.py::test_the_default_model_takes_no_second_copy": 1,
    "cli/test_compare_rounds.py::test_turns_after_so_many_rounds_are_drawn": 0,
    "cli/test_other_commands.py::test_bench_prints_and_saves": 0,
    "cli/test_read.py::test_questions_get_the_answers_of_context": 0,
    "colab/test_notebooks.py::test_runs": 1,
    "engine/test_engine.py::test_a_row_of_a_shared_context_goes_on": 0,
    "engine/test_engine.py::test_warming_an_engine_that_others_use": 0,
    "engine/test_memory.py::test_rows_are_inserted_in_place_and_no_other_row_is_copied": 3,
    "engine/test_memory.py::test_what_was_planned_is_what_is_there": 1,
    "eval/test_needle.py::test_asks_the_toy_model": 0,
    "eval/test_recommend.py::test_what_is_measured_is_what_the_library_gives": 0,
    "eval/test_shared_contexts.py::test_a_context_is_compressed_once": 1,
    "kernels/test_bench.py::test_the_command_measures_and_writes_on_a_bare_machine": 0,
    "kernels/test_decode_mosaic_gpu.py::test_against_the_reference": 1,
    "kernels/test_decode_mosaic_gpu.py::test_lengths_around_every_boundary": 1,
    "kernels/test_decode_tpu.py::TestTpu::test_a_pool_that_rows_share": 1,
    "kernels/test_decode_tpu.py::TestTpu::test_group_sizes": 3,
    "kernels/test_decode_tpu.py::TestTpu::test_head_sizes_and_dtypes": 6,
    "kernels/test_decode_tpu.py::test_more_queries_than_a_turn_takes": 2,
    "kernels/test_decode_tpu.py::test_no_copy_races_with_what_is_read": 2,
    "kernels/test_decode_triton.py::TestTriton::test_a_pool_that_rows_share": 1,
    "kernels/test_decode_triton.py::TestTriton::test_head_sizes_and_dtypes": 3,
    "kernels/test_decode_xla.py::TestXla::test_a_batch_of_one": 3,
    "kernels/test_decode_xla.py::TestXla::test_a_pool_that_rows_share": 1,
    "kernels/test_decode_xla.py::TestXla::test_group_sizes": 3,
    "kernels/test_decode_xla.py::TestXla::test_head_sizes_and_dtypes": 6,
    "kernels/test_mass_tpu.py::TestFasterProducts::test_windows_and_soft_caps": 1,
    "kernels/test_mass_tpu.py::TestTpu::test_windows_and_soft_caps": 1,
    "kernels/test_mass_tpu.py::test_blocks_of_several_parts": 1,
    "kernels/test_matmul_kernels.py::TestTpu::test_groups_and_minima": 3,
    "kernels/test_prefill_tpu.py::test_the_orders_of_chips_with_large_matrix_units": 1,
    "kernels/test_tune.py::test_each_kernel_is_measured_with_the_sizes_it_is_given": 3,
    "kernels/test_tuned.py::test_a_chunks_kernel_uses_what_was_measured": 2,
    "model/test_alibi.py::test_a_row_equals_itself_alone_and_the_plan_is_what_is_allocated": 1,
    "model/test_alibi.py::test_scored_tokens_keep_their_original_positions": 1,
    "model/test_families_golden.py::test_logits_equal_the_references": 0.34,
    "model/test_families_own_reference.py::test_alibi_beside_rms_norms_and_a_gate_generates_and_compresses": 0,
    "model/test_families_policies.py::test_a_policy_answers": 3,
    "model/test_golden_logits.py::test_default_model_continues_as_the_reference": 0,
    "model/test_golden_logits.py::test_tiny_models": 0.5,
    "model/test_group_quantised.py::test_a_model_is_nearly_that_of_floats_and_its_bytes_are_counted": 2,
    "model/test_matmul.py::test_every_form_is_the_plain_product": 0.5,
    "model/test_quantised.py::test_a_model_is_nearly_that_of_floats": 1,
    "policies/test_adaptive.py::test_the_bytes_are_those_of_equal_heads_and_a_page_a_head": 1,
    "policies/test_adaptive.py::test_what_was_saved_in_other_pages_goes_on": 1,
    "policies/test_budgets.py::test_equal_budgets_are_equal_bytes_of_keys_and_values": 1,
    "policies/test_choosing_policies.py::test_a_budget_that_covers_the_prompt_is_the_full_cache": 2,
    "policies/test_choosing_policies.py::test_batches_alone_and_on_a_later_turn": 2,
    "policies/test_choosing_policies.py::test_the_default_model_reads_a_prompt": 0,
    "policies/test_every_option.py::test_every_option_changes_something_or_is_refused": 0.5,
    "policies/test_evicting.py::test_a_budget_that_covers_everything_is_the_full_cache": 1,
    "policies/test_evicting.py::test_a_row_of_a_batch_is_the_row_alone": 1,
    "policies/test_keep_turn.py::test_every_kind_of_policy_keeps_its_size_and_the_turn": 2,
    "policies/test_kvzip.py::test_the_tokenizer_says_how_the_request_is_written_also_within_another_policy": 0,
    "policies/test_lagkv.py::test_a_lag_longer_than_everything_keeps_everything": 1,
    "policies/test_lagkv.py::test_allocations_that_were_once_too_small": 1,
    "policies/test_lagkv.py::test_official_code_keeps_the_same_tokens": 0.25,
    "policies/test_merged.py::test_it_keeps_the_inner_policys_keys_in_as_many_bytes": 2,
    "policies/test_merged.py::test_it_runs_over_turns_in_either_storage": 1,
    "policies/test_protocol.py::test_runs_in_the_compiled_loop_and_a_row_equals_itself_alone": 1,
    "policies/test_razor.py::test_protected_heads_are_fulls_and_the_others_the_inner_policys_alone": 4,
    "policies/test_razor.py::test_the_plan_is_what_is_allocated": 1,
    "policies/test_window_layers.py::test_shared_contexts_and_chunks": 0,
    "recall/test_razor.py::test_protecting_none_loses_it": 0,
    "recall/test_razor.py::test_protecting_the_found_heads_keeps_recall": 0,
    "recall/test_recall.py::test_recalls_with_the_whole_cache": 0,
    "recall/test_recall.py::test_recent_tokens_alone_do_not_recall": 0,
    "recall/test_training.py::test_a_few_steps_reduce_the_loss": 0,
    "rounds/test_conversation.py::test_an_inner_policy_compresses_each_round_by_itself": 1,
    "runtime/test_compiling_ahead.py::test_the_programs_begun_ahead_are_those_that_are_called": 2,
    "runtime/test_few_programs.py::test_twenty_turns_compile_a_few_programs_and_none_after_the_eighth": 1,
    "runtime/test_observing.py::test_rows_in_turns_are_what_all_rows_are": 2,
    "runtime/test_programs.py::test_a_decode_step_aliases_the_cache_and_copies_none_of_it": 4,
    "runtime/test_programs.py::test_planned_bytes_are_the_live_buffers_bytes": 2,
    "runtime/test_repetition.py::test_the_largest_probability_of_every_key_is_the_equations": 1,
    "runtime/test_shared_context.py::test_a_plan_is_what_is_allocated": 1,
    "runtime/test_shared_context.py::test_answers_are_those_of_copies": 1,
    "runtime/test_shared_context.py::test_policies_that_choose_again_copy": 1,
    "runtime/test_shared_context.py::test_rows_go_on_alone_and_together": 0,
    "runtime/test_signals.py::test_window_mass_and_columns_are_dense_attention_summed": 1,
    "sharding/test_aot.py::test_tpu_programs_take_what_is_planned": 0,
    "sharding/test_asked.py::test_a_mesh_gives_what_one_device_gives": 0,
    "sharding/test_block_features.py::test_a_mesh_gives_what_one_device_gives": 6,
    "sharding/test_decode_step.py::test_no_collective_is_of_the_caches_size": 1,
    "sharding/test_grid.py::test_a_mesh_gives_what_one_device_gives": 3,
    "test_chat.py::test_a_cache_is_a_value": 1,
    "test_chat.py::test_caches_of_unlike_allocations_continue_as_one_batch": 1,
    "test_context.py::test_int8_rows_too": 1,
    "test_context.py::test_it_comes_back_from_disk_and_from_host_memory": 1,
    "test_context.py::test_questions_get_the_answers_of_context": 1,
    "test_context.py::test_several_texts_are_conversations_of_rounds": 0,
    "test_float16.py::test_every_policy_gives_what_float32_gives": 2,
    "test_generation.py::test_a_row_of_a_batch_is_the_row_alone_whenever_the_others_end": 1,
    "test_generation.py::test_growing_past_the_first_room_changes_nothing": 1,
    "test_interrupt.py::test_a_script_that_ends_while_something_compiles_ends_well": 0,
    "test_interrupt.py::test_a_turn_broken_off_while_it_compiles_leaves_the_conversation": 1,
    "test_saved_by_earlier_versions.py::test_a_conversation_goes_on": 2,
    "test_saving.py::test_a_loaded_cache_goes_on_as_the_saved_one": 1,
    "test_scoring.py::test_a_row_is_scored_as_it_would_be_alone": 2,
    "test_scoring.py::test_decodes_way_gives_what_generation_gave": 2,
    "test_scoring.py::test_on_a_cache_that_was_read": 1,
    "test_scoring.py::test_prompt_logprobs_are_the_forwards": 1,
    "test_scoring.py::test_prompt_logprobs_of_long_prompts_contexts_and_later_turns": 0,
    "test_scoring.py::test_what_greedy_decoding_gave_is_greedy": 1,
}


def mark_the_others_slow(items: list[pytest.Item]) -> None:
    """Mark cases beyond those that the default suite runs."""
    groups = collections.defaultdict(list)
    for item in items:
        if not item.get_closest_marker("slow"):
            groups[item.nodeid.partition("[")[0].removeprefix("tests/")].append(item)
    for name, wanted in SAMPLED.items():
        cases = groups.get(name, [])
        count = math.ceil(wanted * len(cases)) if wanted < 1 else int(wanted)
        kept = {i * len(cases) // count for i in range(count)}
        for i, item in enumerate(cases):
            if i not in kept:
                item.add_marker(pytest.mark.slow)
