"""Known bugs of other implementations, one row each, and the tests that keep them out of here.

The numbers are those of the design's list of findings (its section 6). A row without a test says
why it cannot happen in this package, or which part of it that does not exist yet has to bring one.
"""

import ast
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
DRAFTERS, OPS, LOOP = "drafters/", "ops/", "decoding/test_loop.py::"

ROWS: dict[int, list[str]] = {
    1: [DRAFTERS + "test_rope.py::test_row_01_legacy_type_yarn"],
    2: [DRAFTERS + "test_rope.py::test_row_02_nested_rope_parameters"],
    3: [OPS + "test_rope.py::test_row_3_far_positions", DRAFTERS + "test_parity.py::test_zlab"],
    4: [DRAFTERS + "test_published.py::test_row_04_mask_token_of_the_drafter"],
    5: [DRAFTERS + "test_published.py::test_row_05_mask_token_zero"],
    6: [DRAFTERS + "test_malformed_drafters.py::test_row_06_codebook_shorter_than_the_vocabulary"],
    7: [DRAFTERS + "test_malformed_drafters.py::test_row_07_predecessor_rows_against_vocabulary"],
    8: [LOOP + "test_rows_08_09_another_drafter_on_the_same_target"],
    9: [LOOP + "test_rows_08_09_another_drafter_on_the_same_target"],
    10: [DRAFTERS + "test_malformed_drafters.py::test_row_10_group_size_and_taps"],
    11: [
        DRAFTERS + "test_malformed_drafters.py::test_row_11_every_convolution_tensor_of_every_layer"
    ],
    12: [
        "policies/test_policies.py::test_row_12_without_scores_nothing_is_cut",
        "policies/test_policies.py::test_row_12_the_gate_needs_scores_for_the_whole_chain",
    ],
    13: [
        "policies/test_policies.py::test_golden_g4_thresholds",
        OPS + "test_markov.py::test_vllm",
        DRAFTERS + "test_parity.py::test_speculators_dspark",
    ],
    14: [LOOP + "test_row_14_offered_is_what_was_verified"],
    16: [
        DRAFTERS + "test_layer_ids.py::test_row_16_capture_layers_from_drafter",
        LOOP + "test_rows_29_33_48_every_row_once_and_in_order",
    ],
    17: [LOOP + "test_row_17_no_more_rows_than_can_be_used"],
    18: [OPS + "test_head.py::test_row_18_k_16_17_and_vocabulary"],
    19: ["gguf/test_gguf_writer.py::test_round_trip"],
    20: [
        "gguf/test_gguf_reader.py::test_failed_opens_leave_nothing",
        "test_hostile.py::test_row_20_failed_loads_leave_nothing",
    ],
    21: [OPS + "test_norm.py::test_row_21_a_weight_that_is_written_is_refused"],
    22: [OPS + "test_delta.py::test_row_22_softplus_threshold"],
    25: [DRAFTERS + "test_attention.py::test_row_25_noncausal_all_sliding"],
    26: [
        "policies/test_policies.py::test_row_26_a_drafter_that_never_pays_is_reported_once",
        "policies/test_policies.py::test_row_26_junk_limits_are_errors",
        "policies/test_policies.py::test_row_26_junk_thresholds_are_errors",
        "policies/test_policies.py::test_outliers_and_junk_times_are_ignored",
    ],
    27: [
        DRAFTERS + "test_published.py::test_row_27_block_seven_is_seven_drafts",
        OPS + "test_markov.py::test_g4_block_of_three_gives_three_tokens_from_row_zero",
    ],
    28: [DRAFTERS + "test_checkpoint.py::test_row_28_heads_inside_the_one_file"],
    29: [LOOP + "test_rows_29_33_48_every_row_once_and_in_order"],
    31: [DRAFTERS + "test_parity.py::test_row_31_multiplier_and_cap_come_before_the_candidates"],
    32: [
        OPS + "test_delta.py::test_row_32_every_rejection_point_continues_like_plain_decoding",
        "test_lossless.py::test_every_verification_equals_plain_steps",
    ],
    33: [
        OPS + "test_delta.py::test_row_33_plain_steps_between_speculative_ones",
        LOOP + "test_rows_33_48_a_real_drafter_drafts_alike_after_a_burst",
    ],
    34: [LOOP + "test_row_34_a_session_that_is_reset_starts_afresh"],
    35: [OPS + "test_delta.py::test_row_35_the_start_may_be_among_the_slots_written"],
    36: [OPS + "test_delta_journal.py::test_row_36_a_decode_step_goes_on_from_the_prefill"],
    37: [OPS + "test_conv.py::test_row_37_wrong_ranks_and_orders_raise"],
    39: [
        OPS + "test_attention.py::test_row_39_nan_padding",
        "test_lossless.py::test_every_verification_equals_plain_steps",
    ],
    40: [LOOP + "test_row_40_caches_grow_in_the_middle"],
    41: [OPS + "test_attention.py::test_row_41_lengths_around_every_edge"],
    42: ["models/test_config.py::test_row_42_gate_and_up_of_different_types"],
    43: [
        DRAFTERS + "test_checkpoint.py::test_row_43_missing_drafter_or_wrong_target",
        DRAFTERS + "test_published.py::test_row_43_drafter_of_another_target",
        "cli/test_generate.py::test_row_43_errors_are_one_line",
    ],
    44: [LOOP + "test_row_44_only_an_exact_extension_is_reused"],
    48: [
        LOOP + "test_rows_29_33_48_every_row_once_and_in_order",
        LOOP + "test_rows_33_48_a_real_drafter_drafts_alike_after_a_burst",
    ],
    51: [
        DRAFTERS + "test_malformed_drafters.py::test_row_51_unknown_tensors_are_listed",
        DRAFTERS + "test_malformed_drafters.py::test_row_51_unknown_architecture",
        "models/test_config.py::test_row_51_other_architectures_are_refused_by_name",
    ],
    52: [
        OPS + "test_rope.py::test_row_52_every_row_turns_by_its_own_position",
        DRAFTERS + "test_reference_cases.py::test_dflash_case",
    ],
    53: [DRAFTERS + "test_published.py::test_row_53_attention_biases"],
    54: [DRAFTERS + "test_rope.py::test_row_54_gguf_and_hf_yarn_magnitude"],
    55: [DRAFTERS + "test_published.py::test_row_55_radixark_config_is_dense_dspark"],
    56: [DRAFTERS + "test_published.py::test_row_56_rank_of_the_tensors_wins"],
    57: [DRAFTERS + "test_layer_ids.py::test_row_57_ids_in_both_layouts"],
    58: [DRAFTERS + "test_gguf_checkpoint.py::test_row_58_d2t_offsets_and_absolute"],
    59: [OPS + "test_conv.py::test_row_59_a_sequence_never_reads_its_neighbour"],
    60: [DRAFTERS + "test_layer_ids.py::test_row_60_int64_target_layer_ids"],
}

REASONS: dict[int, str] = {
    15: "a drafter and a target on two GPUs: the CUDA runner brings it; here all is on one device",
    23: "a heuristic of llama.cpp's tiles; our path is chosen by phase, never by type or size",
    24: "a dispatch by flag in llama.cpp's tensor split; we have no tensor split in this runner",
    30: "a memory pool of llama.cpp's; tensors are torch's",
    38: "leaf tensors of a ggml graph; CUDA graphs come with the CUDA runner",
    45: "positions after an image: the native runner takes text only, all three axes are equal",
    46: "a state copied on another stream: the CPU has none, the CUDA runner brings it",
    47: "a rule for benchmarks, which compare the same text",
    49: "pointers in C#",
    50: "parsers of thinking text: out of scope",
}


@cache
def functions(path: Path) -> frozenset[str]:
    """Names of the test functions of a file, methods of test classes included."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return frozenset(
        n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name[:5] == "test_"
    )


def test_every_row_has_a_test_or_a_reason():
    assert sorted([*ROWS, *REASONS]) == [*range(1, 61)]
    assert all(ROWS.values())
    assert all(REASONS.values())


@pytest.mark.parametrize("row", ROWS)
def test_row(row):
    for name in ROWS[row]:
        file, test = name.split("::")
        assert test in functions(TESTS / file), f"row {row}: {name} is not there"


def test_rows_named_by_tests_are_listed():
    """A test that carries a row's number in its name stands in the row's list."""
    listed = {name.split("::")[1] for names in ROWS.values() for name in names}
    named = {
        test
        for path in TESTS.rglob("test_*.py")
        for test in functions(path)
        if test.startswith(("test_row_", "test_rows_")) and any(c.isdigit() for c in test[:11])
    }
    assert named <= listed
