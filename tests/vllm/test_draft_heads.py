"""Our heads beside vLLM's on the same rows, with the weights of the embedded drafters."""

import engines
import pytest

from torch_dflash.load import ASSETS


def run(target, tmp_path_factory, job, drafter=None):
    return engines.run(
        f"draft_head_jobs:{job}",
        env={"TORCH_DFLASH_CACHE": str(tmp_path_factory.getbasetemp() / "drafters")},
        engine={
            "model": target,
            "speculative_config": {
                "method": "dflash",
                "model": str(drafter or ASSETS / f"{job}.gguf"),
                "num_speculative_tokens": 7,
            },
        },
    ).value


def test_dflash2_has_vllm_s_candidates_and_the_best_path_of_its_edges(target, tmp_path_factory):
    out = run(target, tmp_path_factory, "dflash2")
    assert out["ids"]
    assert out["values"] == 0  # the same logits, picked
    assert out["walk"]


def test_dspark_s_hook_drafts_what_vllm_s_loop_does(target, tmp_path_factory):
    out = run(target, tmp_path_factory, "dspark")
    assert out["done"]
    assert out["tokens"]
    assert out["distinct"] > 6
    assert out["left"] == [False] * 4


@pytest.mark.parametrize("head", ["gated", "rnn"])
def test_a_head_that_vllm_does_not_have_drafts_what_its_formula_says(
    target, tmp_path_factory, tmp_path, head
):
    from torch_dflash.testing.tiny import tiny_drafter

    of_the_embedded_target = {"hidden": 512, "vocab": 4096, "num_target_layers": 6}
    folder = tiny_drafter(tmp_path / head, "dspark", markov_head=head, **of_the_embedded_target)
    out = run(target, tmp_path_factory, "joint", folder)
    for hook in ("op", "walk", "loop", "scored"):
        assert out[hook], hook
    assert out["scores"] < 1e-5  # float32 sums of 528 products against float64
    assert out["matters"] > 0
