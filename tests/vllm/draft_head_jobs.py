"""What a child process does with the heads of a drafter: ours beside vLLM's, on the same rows."""

from types import SimpleNamespace
from typing import Any

import torch
from generate import build
from torch import Tensor

BLOCKS, DRAFTS = 3, 7


def _drafter(engine: dict[str, Any]) -> Any:
    core = build(engine).llm_engine.engine_core.engine_core
    return core.model_executor.driver_worker.worker.model_runner.drafter.model


def _rows(model: Any) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    rows = torch.randn(BLOCKS * DRAFTS, model.config.hidden_size, generator=g)
    return rows, torch.randint(0, model.config.vocab_size, (BLOCKS,), generator=g)


def dflash2(engine: dict[str, Any]) -> dict[str, Any]:
    """Candidates, and a walk along vLLM's edge scores."""
    from vllm.model_executor.models.qwen3_dflash2 import DFlash2Qwen3ForCausalLM

    model = _drafter(engine)
    rows, anchors = _rows(model)
    with torch.inference_mode():
        ids, values = model.compute_candidates(rows)
        wanted_ids, wanted_values = DFlash2Qwen3ForCausalLM.compute_candidates(model, rows)
        model.block.anchors = anchors
        got = model.get_top_tokens(rows).view(BLOCKS, DRAFTS)
        selector = model.model.candidate_selector
        shape = (BLOCKS, DRAFTS, selector.top_k)
        edges = selector(
            wanted_ids.view(shape),
            wanted_values.view(shape),
            rows.view(BLOCKS, DRAFTS, -1),
            anchors,
        )
        walk = torch.zeros(BLOCKS, DRAFTS, dtype=torch.int64)
        previous = [0] * BLOCKS
        for j in range(DRAFTS):
            for b in range(BLOCKS):
                previous[b] = int(edges[b, j, previous[b]].argmax())
                walk[b, j] = wanted_ids.view(shape)[b, j, previous[b]]
    return {
        "ids": torch.equal(ids, wanted_ids),
        "values": (values - wanted_values).abs().max().item(),
        "walk": torch.equal(got, walk),
    }


def dspark(engine: dict[str, Any]) -> dict[str, Any]:
    """Drafts of vLLM's own loop, ours through its hook, and what is left to the loop."""
    from vllm.v1.worker.gpu.spec_decode.dspark.speculator import DSparkSpeculator

    model = _drafter(engine)
    rows, anchors = _rows(model)
    count = BLOCKS * DRAFTS
    speculator = SimpleNamespace(
        model=model,
        num_speculative_steps=DRAFTS,
        sample_indices=torch.arange(count).flip(0),  # any order
        sample_idx_mapping=torch.zeros(count, dtype=torch.int64),
        sample_pos=torch.zeros(count, dtype=torch.int64),
        input_buffers=SimpleNamespace(input_ids=anchors.repeat_interleave(DRAFTS).int()),
        _anchor_idx=torch.arange(BLOCKS) * DRAFTS,
        _draft_topk=None,
        _d2t_scatter_index=None,
        _step_cols=torch.arange(DRAFTS),
        _maybe_predict_acceptance=lambda *a: None,
        draft_logits=None,
        use_confidence_head=False,
        use_acceptance_estimator=False,
        draft_tokens=torch.zeros(BLOCKS + 2, DRAFTS, dtype=torch.int64),
    )
    speculator._sample_logits = lambda *a: DSparkSpeculator._sample_logits(speculator, *a)
    with torch.inference_mode():
        DSparkSpeculator._sample_sequential(speculator, BLOCKS, rows)
        wanted = speculator.draft_tokens.clone()
        speculator.draft_tokens.zero_()
        done = model.sample_sequential(speculator, BLOCKS, rows)
        got = speculator.draft_tokens.clone()
        left = []
        for key, value in (
            ("draft_logits", torch.zeros(1)),
            ("use_confidence_head", True),
            ("use_acceptance_estimator", True),
        ):
            asks = SimpleNamespace(**vars(speculator) | {key: value})
            left.append(model.sample_sequential(asks, BLOCKS, rows))
        model.ours = False
        left.append(model.sample_sequential(speculator, BLOCKS, rows))
    return {
        "done": done,
        "tokens": torch.equal(got, wanted),
        "distinct": len(wanted[:BLOCKS].unique()),
        "left": left,
    }
