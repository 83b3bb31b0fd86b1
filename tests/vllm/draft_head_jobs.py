"""What a child process does with the heads of a drafter: ours beside vLLM's, on the same rows."""

from pathlib import Path
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


def _speculator(model: Any, anchors: Tensor) -> SimpleNamespace:
    """What vLLM's speculator of the V2 runner shows a DSpark model."""
    from vllm.v1.worker.gpu.spec_decode.dspark.speculator import DSparkSpeculator

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
    return speculator


def dspark(engine: dict[str, Any]) -> dict[str, Any]:
    """Drafts of vLLM's own loop, ours through its hook, and what is left to the loop."""
    from vllm.v1.worker.gpu.spec_decode.dspark.speculator import DSparkSpeculator

    model = _drafter(engine)
    rows, anchors = _rows(model)
    speculator = _speculator(model, anchors)
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


def joint(engine: dict[str, Any]) -> dict[str, Any]:
    """Drafts of a head that looks at the hidden rows, through both hooks, beside the formula's."""
    from safetensors.torch import load_file

    from torch_dflash.reference.draft import markov_chain

    stored = load_file(Path(engine["speculative_config"]["model"], "model.safetensors"))
    head = {
        n.removeprefix("markov_head."): t.float() for n, t in stored.items() if "markov_head" in n
    }
    [name] = {n.split(".")[0] for n in head} - {"markov_w1", "markov_w2"}
    model = _drafter(engine)
    rows, anchors = _rows(model)
    speculator = _speculator(model, anchors)
    speculator.draft_token_confidence_probs = torch.zeros(BLOCKS + 2, DRAFTS)
    out = {}
    with torch.inference_mode():
        hidden = rows.flip(0)  # in the order of sample_indices
        arguments = (
            model.compute_draft_logits(hidden).view(BLOCKS, DRAFTS, -1),
            hidden.view(BLOCKS, DRAFTS, -1),
            anchors,
            head["markov_w1.weight"],
            head["markov_w2.weight"],
            stored["confidence_head.proj.weight"],
            stored["confidence_head.proj.bias"],
            *(1.0, None, None, None),
        )
        joint = head[f"{name}.weight"], head[f"{name}.bias"]
        kind = ["gate_proj", "joint_proj"].index(name) + 1
        tokens, _, scores = markov_chain(
            *arguments, head_type=kind, joint=joint[0], joint_bias=joint[1]
        )
        for name, ours, scored in (("op", True, False), ("loop", False, False), ("scored", 1, 1)):
            model.ours, speculator.use_confidence_head = bool(ours), bool(scored)
            speculator.draft_tokens.zero_()
            done = model.sample_sequential(speculator, BLOCKS, rows)
            out[name] = done and torch.equal(speculator.draft_tokens[:BLOCKS], tokens)
        scored = speculator.draft_token_confidence_probs[:BLOCKS]
        model.block.anchors = anchors  # as the V1 runner asks
        out["walk"] = torch.equal(model.get_top_tokens(hidden).view(BLOCKS, DRAFTS), tokens)
        plain, _, _ = markov_chain(*arguments)
    return out | {
        "scores": (scored - scores).abs().max().item(),
        "matters": int((plain != tokens).sum()),
    }
