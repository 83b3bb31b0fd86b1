"""Our heads beside vLLM's on the same rows, with the weights of the embedded drafters."""

import engines

from torch_dflash.load import ASSETS


def run(target, tmp_path_factory, kind):
    return engines.run(
        f"draft_head_jobs:{kind}",
        env={"TORCH_DFLASH_CACHE": str(tmp_path_factory.getbasetemp() / "drafters")},
        engine={
            "model": target,
            "speculative_config": {"method": "dflash", "model": str(ASSETS / f"{kind}.gguf")},
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
