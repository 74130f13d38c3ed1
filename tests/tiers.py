"""Which tests `make test` leaves to `make check`, by name: the dear ones whose subject a cheaper test touches too.

`make test` takes at most five minutes on 2 idle cores, and each part of the product keeps a test in it. `make check`
ends with the dearest tests and their seconds. What a decorator marks as slow is not listed again. An entry that names
no test is an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from tests.helpers.paths import ROOT

WHOLE = ("training/train/test_textbook_rl",)  # files, below tests/

# `make test` runs one in so many cases of each of these tests: the cases are alike in what they ask of the code.
ONE_IN: Mapping[str, int] = {
    "bench/test_selftest::test_every_engine_and_layout_is_tried_on_all_ranks": 5,
    "compare/test_divergence::test_what_of_its_length_a_curve_depends_on": 3,
    "compare/test_spoilt::test_a_file_of_anything": 9,
    "compare/test_spoilt::test_a_file_without_an_end": 4,
    "compare/test_spoilt::test_a_value_of_another_kind": 9,
    "config/test_trust::test_an_older_run_may_lack_groups": 4,
    "config/test_literals::test_a_configuration_comes_back_from_its_file": 2,
    "config/test_literals::test_a_run_s_texts_are_those_of_its_evaluation": 4,
    "config/test_literals::test_a_text_stays_itself_on_a_command_line_and_in_an_experiment": 4,
    "config/test_config::test_engines_and_checkpoints_are_checked_before_a_process_starts": 3,
    "config/test_config::test_every_option_of_every_group_composes": 2,
    "config/test_config::test_rules_across_fields": 3,
    "config/test_config::test_wrong_input_is_one_message": 6,
    "config/test_preference::test_a_modifier_passes_where_it_fits_and_nowhere_else": 6,
    "config/test_preference::test_a_reference_is_refused_where_the_loss_has_none": 6,
    "config/test_preference::test_what_does_not_fit_is_refused_in_one_message": 6,
    "convert/test_adapters::test_the_experiment_composes_with_its_reference": 4,
    "convert/test_examples::test_an_example_of_theirs_composes": 3,
    "convert/test_losses::test_its_experiment_composes": 6,
    "convert/test_values::test_no_value_is_a_traceback_and_none_is_lost": 48,
    "convert/test_written::test_the_command_names_the_folder_of_the_file": 6,
    "eval/test_as_its_run::test_each_key_is_that_of_the_run": 16,
    "eval/test_as_its_run::test_the_values_are_those_of_the_run_s_row": 104,
    "eval/test_eval::test_wrong_words_are_one_message": 4,
    "house/test_commands::test_a_command_is_one": 6,
    "house/test_keys::test_what_is_changed_in_conf_is_seen": 2,
    "house/test_rooms::test_a_package_has_one_door": 4,
    "house/test_rooms::test_a_planted_circle_is_found": 3,
    "house/test_rooms::test_an_import_that_leads_up_is_found": 2,
    "house/test_rooms::test_an_import_that_the_table_does_not_list_is_found": 2,
    "house/test_wheel::test_its_configuration_composes": 3,
    "launch/test_slurm_script::test_a_dry_run_shows_what_would_be_sent": 2,
    "launch/test_slurm_script::test_a_wrong_launcher_key_is_told_before_anything_is_handed_over": 3,
    "launch/test_slurm_script::test_what_no_cluster_could_run_is_refused": 3,
    "long_pairs/test_long_pairs::test_what_is_wrong_is_one_message": 3,
    "preflight/test_changes::test_what_a_run_is_offered": 3,
    "preflight/test_children::test_a_task_that_ends_with_an_error_has_its_own_result": 6,
    "preflight/test_children::test_an_error_is_raised_where_it_was_asked_for": 2,
    "preflight/test_communicators::test_the_groups_of_a_step": 3,
    "preflight/test_communicators::test_no_group_of_ours_is_made_that_nothing_uses": 2,
    "preflight/test_launches::test_fused_pieces_halve_the_launches_and_move_less": 2,
    "preflight/test_longest_that_fits::test_the_longest_is_found": 6,
    "preflight/test_preflight::test_wrong_input_gets_one_message": 3,
    "preflight/test_rehearse::test_a_planted_wait_is_found_with_its_place": 2,
    "preflight/test_rehearse::test_the_host_waits_for_nothing_in_a_micro_batch": 2,
    "run/test_cli::test_bad_data_is_one_message": 2,
    "run/test_recipes::test_without_a_gpu_a_recipe_says_what_can_be_done": 3,
    "training/dataset/test_bad_rows::test_sources_that_do_not_fit_are_refused_before_a_row_is_read": 3,
    "training/dataset/test_textbook_rows::test_real_pairs_in_every_format": 4,
    "training/dataset/test_textbook_rows::test_rows_at_random": 8,
    "training/dataset/test_textbook_singles::test_both_read_the_same": 2,
    "training/dataset/test_textbook_singles::test_rows_at_random": 4,
    "training/model/test_model::test_the_copy_keeps_what_the_probe_tests": 2,
    "training/model/test_pretrained::test_a_named_model_says_what_it_is": 4,
    "training/model/test_pretrained::test_wrong_input_is_one_message": 3,
    "training/ring/test_attention::test_calls_that_are_cut_are_the_whole_ones": 3,
    "training/ring/test_kernels::test_equals_the_plain_kernel": 2,
    "training/ring/test_ring_flash_attn::test_what_it_cannot_is_refused": 5,
    "training/rollout/test_rollout_faults::test_what_cannot_be_is_refused_by_its_composition": 4,
    "training/rollout/test_sampling::test_a_row_reads_the_same_with_others_beside_it_in_pieces_and_after_they_left": 2,
    "training/train/test_adapter::test_wrong_input_is_one_message": 3,
    "training/train/test_operations::test_the_formula_is_what_operators_count": 2,
    "training/train/test_schedule::test_no_loss_is_trained_at_the_rate_of_dpo_unless_it_is_of_its_kind": 3,
    "verify/test_kept::test_what_the_transport_still_holds_is_not_kept": 4,
    "verify/test_verify::test_a_mistake_is_one_message": 3,
}

SLOW: Mapping[str, tuple[str, ...]] = {
    "bench/test_bench_attention": (
        "test_a_table_that_fails_says_so_and_the_others_are_there",
        "test_it_runs_on_cpu_where_only_torch_is_installed",
        "test_it_says_that_there_is_no_gpu",
    ),
    "bench/test_bench_gpu": (
        "test_a_case_that_is_wrong_says_so_and_the_others_go_on",
        "test_a_part_of_flash_attn_has_the_heads_of_its_cases",
        "test_a_prediction_that_was_stopped_goes_on",
        "test_the_rates_are_rehearsed",
    ),
    "bench/test_beside_trl": ("test_a_step_is_profiled",),
    "bench/test_recipes_run": ("test_a_recipe_runs_to_its_end_with_a_tiny_model",),
    "bench/test_rollouts_gpu": ("test_the_model_of_a_billion_has_its_head_once", "test_what_a_gpu_would_run_composes"),
    "bench/test_selftest": ("test_the_kernels_are_rehearsed",),
    "compare/test_compare": ("test_watching_redraws_until_the_runs_have_ended",),
    "config/test_config": (
        "test_a_ring_larger_than_the_gpus",
        "test_every_option_of_every_group_composes[hardware]",
        "test_every_option_of_every_group_composes[loss]",
        "test_every_option_of_every_group_composes[model]",
        "test_help_lists_every_group",
    ),
    "config/test_random_configs": ("test_a_random_command_line_composes_or_is_one_message",),
    "convert/test_completeness": ("test_every_option_is_reached_or_ours_alone",),
    "convert/test_examples": ("test_the_command_writes_an_experiment_that_trains",),
    "dashboard/test_dashboard": (
        "test_the_workspace_that_is_sent[True]",
        "test_what_the_server_refuses_is_one_message",
    ),
    "eval/test_as_its_run": ("test_the_reference_is_that_of_the_run_however_it_is_computed",),
    "eval/test_eval": (
        "test_a_damaged_checkpoint_is_passed_over",
        "test_another_loss_may_evaluate_a_checkpoint",
        "test_only_the_place_of_held_out_rows_must_be_there",
        "test_rows_held_out_from_among_others_are_those_of_the_run",
    ),
    "export/test_export": ("test_a_checkpoint_is_exported_by_hand",),
    "generate/test_generate": ("test_a_run_on_rewards_answers_the_rows_that_it_held_out",),
    "house/test_mutants": ("test_every_place_of_training_can_be_watched_and_changed",),
    "house/test_planted_faults": ("test_a_rank_that_the_others_wait_for_is_named",),
    "house/test_wheel": ("test_it_shows_what_slurm_would_be_sent_and_has_the_scripts", "test_it_trains"),
    "launch/test_before_start": (
        "test_a_config_that_is_none_is_one_message",
        "test_a_job_that_cannot_fit_is_skipped_and_the_others_run",
        "test_a_rehearsal_that_takes_too_long_stops_nothing",
        "test_a_run_that_cannot_fit_names_a_change_that_does",
    ),
    "launch/test_joining": ("test_who_does_not_come_to_the_meeting_is_named",),
    "launch/test_sweep": ("test_a_sweep_goes_on_and_says_what_was_not_run", "test_every_job_is_told_what_is_its_own"),
    "long_pairs/test_long_pairs": ("test_a_ring_of_two_trains_on_them",),
    "preflight/test_host": ("test_the_prediction_is_what_real_ranks_hold[zero1]",),
    "preflight/test_layout_choice": (
        "test_a_run_says_which_layout_it_takes_and_why",
        "test_auto_takes_the_layout_whose_rehearsal_is_fastest",
    ),
    "preflight/test_longest_that_fits": ("test_the_rank_that_holds_most_is_shown",),
    "preflight/test_memo": ("test_what_is_remembered_moves_no_event_and_no_count",),
    "preflight/test_preflight": (
        "test_where_no_single_change_fits_it_says_what_would",
        "test_a_config_that_is_none_is_refused",
        "test_a_small_model_on_a_ring_of_2",
    ),
    "preflight/test_rehearse": (
        "test_a_module_that_keeps_the_whole_sequence_is_named[ring4, checkpointing]",
        "test_a_planted_wait_is_found_with_its_place[tokens are copied from pageable memory]",
        "test_many_layers_follow_exactly_from_a_few",
        "test_what_is_predicted_is_what_real_ranks_count[fsdp2-ring2-bf16-attention]",
        "test_what_is_predicted_is_what_real_ranks_count[zero0-ring2-bf16-attention]",
        "test_what_is_predicted_is_what_real_ranks_count[zero1-ring2-bf16-attention]",
        "test_what_is_predicted_is_what_real_ranks_count[zero2-ring2-bf16-attention]",
        "test_what_is_predicted_is_what_real_ranks_count[zero3-ring2-bf16-attention]",
        "test_what_is_sharded_is_not_named",
    ),
    "preflight/test_rehearse_rollouts": ("test_what_is_predicted_is_what_real_ranks_count",),
    "preflight/test_vllm": (
        "test_real_ranks_hold_what_is_rehearsed_without_vllm",
        "test_the_launcher_is_told_the_share[words0-True]",
        "test_the_report_says_what_vllm_holds",
    ),
    "run/test_cli": (
        "test_a_closed_terminal_does_not_end_a_run",
        "test_a_held_out_loss_that_is_not_finite_is_said",
        "test_a_killed_rank_ends_the_run_within_ten_seconds",
        "test_a_ring_of_four_trains_and_says_so",
        "test_a_trained_model_is_trained_on",
        "test_fresh_processes_for_gpus_are_ranks_too",
        "test_help_may_be_read_in_part",
        "test_it_learns_the_rule_of_the_synthetic_pairs",
        "test_under_torchrun_it_joins_what_is_there",
    ),
    "run/test_recipes": (
        "test_a_recipe_fits_as_the_page_says",
        "test_a_recipe_trains_a_small_model_on_a_cpu[dpo_8b_128k]",
        "test_a_recipe_trains_a_small_model_on_a_cpu[grpo_8b]",
        "test_a_recipe_trains_a_small_model_on_a_cpu[lora_8b]",
        "test_a_recipe_trains_a_small_model_on_a_cpu[lora_8b_1gpu]",
        "test_a_recipe_trains_a_small_model_on_a_cpu[reward_8b]",
        "test_a_recipe_trains_a_small_model_on_a_cpu[sft_8b]",
        "test_the_recipe_for_two_nodes_trains_under_two_torchruns",
    ),
    "run_files/test_rollout_records": (
        "test_a_loss_of_advantages_that_cancel_is_no_difference",
        "test_curves_are_compared_up_to_the_first_sample_that_differs[bf16]",
        "test_each_pair_is_held_as_far_as_its_own_samples_agree",
        "test_in_float64_a_sample_that_differs_is_a_defect",
        "test_the_first_rollout_differs_and_nothing_is_left",
        "test_wandb_has_the_table_with_the_row_of_its_step",
    ),
    "status/test_status": ("test_a_sweep_that_has_ended", "test_while_training_and_when_killed"),
    "training/checkpoint/test_moments": ("test_moments_go_on_from_one_engine_to_the_next",),
    "training/checkpoint/test_resume": (
        "test_a_finished_run_has_nothing_to_do_until_it_is_made_longer",
        "test_a_finished_run_without_a_checkpoint_is_not_written_over",
        "test_a_run_that_ended_before_its_first_checkpoint_begins_again",
        "test_every_task_goes_on_from_ring_to_ring[reward]",
        "test_a_signal_finishes_the_step_and_saves[SIGTERM]",
        "test_a_signal_finishes_the_step_and_saves[SIGUSR1]",
        "test_a_signal_to_the_whole_process_group_is_one_request[SIGTERM]",
        "test_one_rank_alone_may_be_asked",
        "test_the_curve_goes_on_in_float64[edge of an epoch]",
        "test_the_last_and_the_best_are_kept",
    ),
    "training/checkpoint/test_rollout_resume": (
        "test_a_curve_goes_on_between_mini_batches",
        "test_damage_to_the_samples_is_refused",
    ),
    "training/checkpoint/test_shares": ("test_shares_of_the_data_and_of_the_run_are_the_same_on_every_layout",),
    "training/dataset/test_bad_rows": ("test_a_file_of_anything_is_read_or_refused_in_one_message",),
    "training/engine/test_engines": (
        "test_a_loss_that_is_not_finite_stops_all_ranks_before_the_step",
        "test_a_rank_without_a_trained_token_does_not_hang_the_others",
        "test_bf16_adds_up_its_micro_batches_once",
        "test_bf16_keeps_float32_masters",
        "test_gradient_of_an_engine_of_each_kind_is_exact",
        "test_weights_can_be_read_after_an_evaluation",
    ),
    "training/engine/test_frozen": ("test_an_evaluation_holds_the_weights_of_a_checkpoint_alone[three in bf16]",),
    "training/engine/test_streamed": (
        "test_an_adapter_is_compared_with_it[zero3]",
        "test_it_has_the_bits_of_a_model_in_memory",
    ),
    "training/metrics/test_counted": (
        "test_a_larger_ring_holds_fewer_bytes_as_predicted",
        "test_counting_moves_no_number_and_its_choice_misses_nothing",
    ),
    "training/model/test_model": ("test_the_probe_of_a_large_model_is_small",),
    "training/model/test_placing": ("test_a_planted_clone_of_all_weights_is_found",),
    "training/model/test_pretrained": ("test_every_engine_starts_from_the_same_rounded_weights",),
    "training/model/test_rope": (
        "test_a_ring_computes_what_transformers_computes_beyond_the_native_length[random-1]",
        "test_a_ring_computes_what_transformers_computes_beyond_the_native_length[random-4]",
    ),
    "training/ring/test_attention": ("test_equals_full_attention[1]", "test_equals_full_attention[2]"),
    "training/ring/test_collectives": (
        "test_tokens_held_and_bytes_sent_are_the_layouts[1]",
        "test_tokens_held_and_bytes_sent_are_the_layouts[2]",
    ),
    "training/ring/test_deepspeed_ulysses": ("test_deepspeed_s_ulysses_has_the_same_dpo_loss_and_gradient",),
    "training/ring/test_fused": ("test_the_fused_kernels_equal_plain_torch",),
    "training/ring/test_kernels": ("test_the_ring_needs_torch_alone",),
    "training/ring/test_ring_flash_attn": (
        "test_a_library_that_computes_something_else_is_found",
        "test_equals_full_attention[2]",
        "test_it_computes_what_our_own_layouts_do[(2,)]",
    ),
    "training/ring/test_slices": (
        "test_forests_and_windows_on_real_ranks[2]",
        "test_gradients_travel_in_the_dtype_of_the_kernel_or_as_sums",
    ),
    "training/ring/test_torch_ring": (
        "test_torch_s_own_ring_attention_agrees[2]",
        "test_torch_s_own_ring_attention_agrees[4]",
    ),
    "training/rollout/test_pipelined": ("test_a_step_behind_is_weighed_by_what_is_now_likely",),
    "training/rollout/test_rollout_ends": (
        "test_a_pipelined_run_that_is_asked_to_stop_saves_what_is_being_drawn",
        "test_a_rollout_that_has_begun_keeps_its_size",
    ),
    "training/rollout/test_rollout_faults": (
        "test_a_death_while_sampling_leaves_no_process[launcher]",
        "test_a_prompt_longer_than_the_limit",
        "test_a_rank_that_dies_while_rewards_are_judged_takes_their_workers_along",
        "test_a_reward_that_fails_says_for_which_sample[hangs-said2]",
        "test_a_reward_that_fails_says_for_which_sample[nan-said3]",
        "test_a_reward_that_fails_says_for_which_sample[too_few-said4]",
        "test_alike_scores_move_only_the_critic",
        "test_empty_answers_that_are_all_alike_move_no_policy",
        "test_without_a_group_of_use_nothing_is_trained_on",
    ),
    "training/sinks/test_wandb": (
        "test_a_run_that_dies_of_memory_leaves_where",
        "test_alerts_where_the_loss_leaves_its_baseline_and_where_the_run_fails",
        "test_offline_becomes_online_by_sync[one fragment]",
        "test_what_wandb_refuses_is_one_message",
    ),
    "training/train/test_adapter": (
        "test_frozen_weights_are_held_in_the_precision_that_computes",
        "test_what_does_not_fit_the_model_is_one_message",
    ),
    "training/train/test_deterministic": ("test_two_runs_on_a_ring_of_two_have_the_same_bits",),
    "training/train/test_invariance": (
        "test_a_tail_is_the_same_on_every_layout",
        "test_fused_pieces_and_kept_attention_move_nothing",
        "test_the_bug_report_draws_one_curve",
        "test_windows_do_not_move_with_the_layout[zigzag]",
    ),
    "training/train/test_precompute": (
        "test_a_damaged_file_is_made_anew[changed]",
        "test_it_is_the_reference_in_memory_over_a_ring_and_over_replicas",
        "test_only_rows_that_the_run_asks_for_are_computed",
    ),
    "training/train/test_reference_model": (
        "test_every_engine_holds_it",
        "test_the_policy_is_compared_with_it_on_a_ring",
    ),
    "training/train/test_task": ("test_preflight_rehearses_it", "test_verify_finds_it_right"),
    "training/train/test_textbook": ("test_first_step_equals_the_textbook[parallel=ring8 memory.checkpointing=true]",),
    "training/dataset/test_textbook_rows": (
        "test_real_pairs_by_templates[None]",
        "test_real_pairs_by_templates[gemma]",
        "test_real_pairs_by_templates[llama3]",
        "test_real_pairs_by_templates[qwen3]",
    ),
    "verify/test_fit_memory": (
        "test_a_pretrained_model_keeps_its_first_layers",
        "test_a_shrunk_model_is_verified_and_said_to_be_shrunk",
        "test_float64_is_run_over_the_layout_that_the_run_takes",
    ),
    "verify/test_verify": (
        "test_a_defect_is_found_and_its_module_named[a child sees its sibling]",
        "test_a_defect_is_found_and_its_module_named[a reward given to the neighbour]",
        "test_a_defect_is_found_and_its_module_named[a shared trained token counts for one sequence]",
        "test_a_defect_is_found_and_its_module_named[a unit is dealt twice]",
        "test_a_defect_is_found_and_its_module_named[divided by the accumulation again]",
        "test_a_defect_is_found_and_its_module_named[not causal]",
        "test_a_defect_is_found_and_its_module_named[not clipped]",
        "test_a_defect_is_found_and_its_module_named[replicated sums counted on every rank]",
        "test_a_mixture_of_conversations_passes",
        "test_chat_messages_and_odd_texts_pass",
        "test_no_layout_keeps_the_whole_sequence",
        "test_the_default_passes",
        "test_what_diverges_in_the_reference_too_is_the_users",
    ),
}


def mark(items: Sequence[pytest.Item], *, whole: bool) -> None:
    """Mark tests as slow. An entry without a file is an error; without a test, too, if its file is collected whole."""
    found: set[tuple[str, str]] = set()
    cases: dict[str, int] = {}
    for item in items:
        file, _, name = item.nodeid.removeprefix("tests/").partition(".py::")
        function = name.partition("[")[0]
        entries = (
            {("", file)} if file in WHOLE else {(file, each) for each in (name, function) if each in SLOW.get(file, ())}
        )
        if (few := ONE_IN.get(f"{file}::{function}")) is not None:
            found.add((file, function))
            cases[f"{file}::{function}"] = number = cases.get(f"{file}::{function}", -1) + 1
            if number % few:
                item.add_marker(pytest.mark.slow)
        if entries:
            found |= entries
            item.add_marker(pytest.mark.slow)
    listed = {(file, name) for file, names in SLOW.items() for name in names}
    listed |= {("", file) for file in WHOLE} | {tuple(each.split("::")) for each in ONE_IN}
    collected, there = (
        {path.relative_to(ROOT / "tests").with_suffix("").as_posix() for path in paths}
        for paths in ({item.path for item in items}, (ROOT / "tests").rglob("test_*.py"))
    )
    left_out = there - collected  # by what was asked for, or a whole file that is skipped
    wrong = [(file, name) for file, name in listed - found if (file or name) not in left_out]
    if whole and wrong:
        raise pytest.UsageError(f"tests/tiers.py names tests that are not there: {sorted(wrong)}")
