# ruff: noqa: E501 (names of tests)
"""Every bad input that was written down for programs, answers, rewards, data and recipes has a test, by its id.

The list of ids lies beside the repository where it is at hand; the tests named here exist in any case.
"""

from __future__ import annotations

import ast
import os
import re
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
LIST = Path(os.environ.get("GROPIUS_CORPUS", TESTS.parents[1] / "shared" / "corpus")) / "outcomes.md"

HOSTILE = "sandbox/test_hostile.py::test_a_hostile_program_is_rejected_and_the_next_honest_one_scores"
COVERED: dict[str, tuple[str, ...]] = {
    "C01": ("sandbox/test_hostile.py::test_an_honest_program_scores",),
    **dict.fromkeys(("C02", "C03", "C04", "C05", "C07", "C09", "C10", "C17", "C19", "C20", "C23", "C28"), (HOSTILE,)),
    "C11": ("sandbox/test_hostile.py::test_files_that_one_program_leaves_are_not_there_for_the_next",),
    "C13": ("sandbox/test_hostile.py::test_nothing_of_the_host_can_be_read",),
    "C15": ("sandbox/test_hostile.py::test_no_connection_leaves_the_sandbox",),
    "C16": (HOSTILE, "sandbox/test_hostile.py::test_a_hundred_at_once_do_not_disturb_each_other"),
    "C21": (HOSTILE, "sandbox/test_hostile.py::test_an_honest_program_scores"),
    "C25": ("sandbox/test_hostile.py::test_calls_that_could_break_out_are_refused",),
    "C27": (HOSTILE, "sandbox/test_hostile.py::test_an_honest_program_scores"),
    "C29": (HOSTILE, "sandbox/test_values.py::test_a_forged_value_is_a_breach_of_protocol"),
    "C31": ("sandbox/test_hostile.py::test_a_table_of_the_visible_tests_fails_the_hidden_ones",
            "rewards/test_code.py::test_a_table_of_the_shown_tests_is_told_from_other_wrong_programs"),
    "C32": ("sandbox/test_hostile.py::test_the_hash_seed_is_fixed",
            "rewards/test_code.py::test_a_program_whose_results_differ_is_flaky"),
    "C34": ("sandbox/test_check.py::test_a_sandbox_that_does_not_start_is_unavailable_and_never_a_failure_of_the_program",
            "sandbox/test_check.py::test_a_machine_out_of_processes_is_unavailable_and_never_a_failure_of_the_program",
            "rewards/test_code.py::test_missing_isolation_is_void_and_never_zero",
            "train/test_void.py::test_too_many_voids_halt_with_the_cause_and_the_run_goes_on_when_it_is_mended"),
    "C35": ("rewards/test_code.py::test_a_reply_without_one_program_is_rejected_for_its_own_reason", HOSTILE),
    **dict.fromkeys(("M01", "M02", "M03", "M05", "M06"), ("rewards/test_math.py::test_a_reply_that_commits_to_no_single_right_answer_is_rejected",)),
    "M07": ("rewards/test_math.py::test_a_hostile_answer_is_rejected_by_its_size_before_any_work",
            "rewards/test_math.py::test_threads_tasks_and_workers_give_the_same_verdicts",
            "rewards/test_second.py::test_the_real_library_agrees_on_everyday_answers_and_survives_hostile_ones"),
    "M08": ("rewards/test_math.py::test_model_text_is_never_run",
            "rewards/test_text.py::test_each_broken_countdown_rule_is_its_own_reason"),
    "M09": ("rewards/test_text.py::test_each_broken_countdown_rule_is_its_own_reason",),
    "M10": ("rewards/test_math.py::test_an_answer_scores_however_it_is_spelled",),
    "M13": ("rewards/test_math.py::test_a_wrong_or_unworked_answer_is_rejected_with_its_reason",),
    "M15": ("rewards/test_text.py::test_tags_pay_only_for_the_whole_form",),
    "M16": ("rewards/test_math.py::test_a_reply_that_commits_to_no_single_right_answer_is_rejected",
            "rewards/test_remote.py::test_the_service_sees_the_episode_and_its_number_is_the_score"),
    "M18": ("rewards/test_base.py::test_a_verdict_does_not_depend_on_batch_mates",
            "rewards/test_check_reward.py::test_chance_and_state_are_found"),
    "R01": ("rewards/test_base.py::test_one_failure_of_many_is_void_with_its_text",
            "rewards/test_pool.py::test_a_value_that_is_not_finite_is_void"),
    "R02": ("rewards/test_base.py::test_none_is_not_applicable_and_leaves_the_sum",
            "rewards/test_base.py::test_when_nothing_applies_the_verdict_is_void_and_it_is_said"),
    "R03": ("rewards/test_base.py::test_a_wrong_type_halts_and_names_the_function",
            "rewards/test_base.py::test_a_batch_of_wrong_length_or_type_halts",
            "rewards/test_base.py::test_a_batch_that_is_no_list_halts"),
    "R04": ("rewards/test_base.py::test_one_failure_of_many_is_void_with_its_text",
            "rewards/test_base.py::test_failing_everywhere_halts_and_names_the_function",
            "rewards/test_pool.py::test_whatever_ends_a_function_stays_in_its_process_and_voids_one_episode"),
    "R05": ("rewards/test_pool.py::test_a_hang_is_cut_off_at_the_deadline_and_leaves_no_process",
            "rewards/test_pool.py::test_a_worker_that_holds_too_much_memory_is_replaced",
            "rewards/test_pool.py::test_what_a_function_leaves_open_ends_with_its_worker"),
    "R07": ("rewards/test_check_reward.py::test_every_fault_is_found_by_name",
            "rewards/test_check_reward.py::test_pay_for_form_alone_and_a_dominating_part_are_found"),
    "R09": ("train/test_void.py::test_void_responses_leave_loss_and_baseline_and_a_group_of_one_valid_sibling_is_dropped",
            "objective/test_statistics.py::test_a_partial_group_is_a_singleton_and_carries_nothing",
            "objective/test_statistics.py::test_an_empty_group_is_an_error_and_not_zero"),
    "D01": ("tasks/test_sources.py::test_a_broken_row_is_refused_by_file_and_row",
            "tasks/test_sources.py::test_csv_with_only_a_header_or_too_many_cells_is_refused",
            "tasks/test_sources.py::test_rows_can_be_filtered_but_not_all_away"),
    "D02": ("train/test_overlong.py::test_a_prompt_at_the_exact_limit_stays_and_one_token_more_is_dropped_and_counted",
            "train/test_overlong.py::test_refusing_names_the_row_and_both_numbers"),
    "D03": ("tasks/test_preflight.py::test_duplicates_are_a_note_and_two_answers_to_one_prompt_a_finding",
            "tasks/test_sources.py::test_equal_rows_are_kept_as_tasks_of_their_own_and_reported"),
    "D05": ("tasks/test_programs.py::test_mbpp_has_its_official_split_without_the_two_rows_that_fail_their_own_tests",
            "cli/test_reading_verbs.py::test_missing_data_an_unknown_reward_and_unusable_gold_are_named"),
    "D06": ("tasks/test_sources.py::test_byte_order_mark_crlf_and_odd_line_separators_load",
            "tasks/test_sources.py::test_lone_surrogates_are_replaced_and_counted"),
    "D09": ("tasks/test_sources.py::test_messages_no_template_takes_are_refused_with_the_row",),
    "D10": ("models/test_load.py::test_a_tokenizer_without_a_chat_template_is_taken_with_a_note",
            "models/test_load.py::test_a_tokenizer_larger_than_the_embedding_is_refused",
            "models/test_load.py::test_stop_tokens_are_those_of_the_generation_config_and_of_the_tokenizer"),
    "D11": ("recipe/test_load.py::test_a_fault_names_file_line_and_key_and_says_what_to_write",),
    "D12": ("recipe/test_resolve.py::test_a_model_that_cannot_be_trained_in_memory_is_refused_with_the_estimate",
            "recipe/test_resolve.py::test_checkpoints_that_do_not_fit_on_the_disk_are_refused_with_the_estimate"),
}  # fmt: skip


@cache
def names_in(file: str) -> frozenset[str]:
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def test_every_test_that_answers_for_an_input_exists() -> None:
    named = {test for tests in COVERED.values() for test in tests}
    gone = [test for test in sorted(named) if test.partition("::")[2] not in names_in(test.partition("::")[0])]
    assert gone == []


@pytest.mark.skipif(not LIST.exists(), reason="set GROPIUS_CORPUS to the folder of the written list")
def test_every_written_input_has_its_test() -> None:
    rows = re.findall(r"^\| ([CMRD]\d\d) \|", LIST.read_text(encoding="utf-8"), re.M)
    assert len(rows) > 40
    assert sorted(rows) == sorted(COVERED)
