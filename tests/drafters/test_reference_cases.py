"""Drafters against z-lab, vLLM, speculators and llama.cpp: the fixtures' numbers and tolerances."""

import pytest
import torch
from safetensors import safe_open

from torch_dflash.decoding.sampling import GREEDY
from torch_dflash.drafters import drafter_for
from torch_dflash.drafters.checkpoint import load_checkpoint
from torch_dflash.gguf import GGUFFile, QuantTensor
from torch_dflash.nn import Vocabulary

HIDDEN, PROBABILITY = 2e-4, 2e-5  # absolute, from the fixtures' README: float32 against float32

DFLASH = [
    "d1_full",
    "d1_mha_bias_eps",
    "d1_mqa",
    "d1_swa_legacy_causal",
    "d1_swa_noncausal",
    "d1_mixed_legacy",
    "d1_mixed_noncausal",
    "d1_mixed_causal",
    "d1_yarn",
    "d1_yarn_legacy_type",
    "d1_yarn_mscale_notrunc",
    "d1_scaled",
    "d2_full",
    "d2_taps3",
    "d2_taps1_groupH",
    "d2_group1",
    "d2_swa_noncausal",
    "d2_mixed_legacy",
    "d2_scaled",
    "d2_yarn",
    "d2_k1",
]
DSPARK = [
    "vanilla_anchor",
    "vanilla_bonus",
    "conf_hidden_only",
    "no_confidence",
    "reduced_vocab",
    "reduced_vocab_bonus",
    "logit_scale",
    "gated",
    "rnn",
]
GGUF = [
    "dflash",
    "dflash_swa_noncausal_w8",
    "dflash_causal",
    "dflash_dc_causal",
    "dflash_yarn",
    "dflash_partial_rotary",
    "dflash_interleaved_rope",
    "dflash_value_scale_sinks",
    "dflash2",
    "dflash2_swa_w8",
    "dflash2_scaled_taps3",
    "dspark",
    "dspark_speculators_bonus",
    "dspark_speculators_d2t",
]


def read(path):
    with safe_open(path, "pt") as file:
        return {k: file.get_tensor(k) for k in file.keys()}, file.metadata()  # noqa: SIM118


def vocabulary_of(io):
    return Vocabulary(*(QuantTensor.from_tensor(io[k]) for k in ("embed_tokens", "lm_head")))


def steps(io):
    for i in range(100):
        if f"step{i}.anchor" not in io:
            return
        prefix = f"step{i}."
        yield {k.removeprefix(prefix): v for k, v in io.items() if k.startswith(prefix)}


def close(actual, expected, tolerance):
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


def run_steps(drafter, io):
    """Hidden states, logits, greedy proposal and confidence of every step."""
    config = drafter.config
    count = 0
    for step in steps(io):
        drafter.commit(step["context"])
        rows = int(step["n_q"])
        first = 0 if config.kind == "dspark" and config.sample_from_anchor else 1
        hidden = drafter.forward(step["anchor"], rows)
        close(hidden, step["hidden"], HIDDEN)
        proposal = drafter.propose(step["anchor"], rows - first, GREEDY, rows)
        assert proposal.tokens[0].tolist() == step["draft_ids"].tolist()
        assert proposal.offered.tolist() == [rows - first]
        if "confidence" in step:
            close(proposal.confidence[0], step["confidence"], PROBABILITY)
        else:
            assert proposal.confidence is None
        # a block leaves nothing behind
        close(drafter.forward(step["anchor"], rows), hidden, 0)
        count += 1
    assert count >= 3


@pytest.mark.parametrize("case", DFLASH)
def test_dflash_case(case, fixtures):
    folder = fixtures / "dflash" / case
    io, _ = read(folder / "io.safetensors")
    checkpoint = load_checkpoint(folder)
    run_steps(drafter_for(checkpoint.config, checkpoint.tensors, vocabulary_of(io)), io)


@pytest.mark.parametrize("case", DSPARK)
def test_dspark_case(case, fixtures):
    folder = fixtures / "dspark" / case
    io, _ = read(folder / "io.safetensors")
    checkpoint = load_checkpoint(folder)
    run_steps(drafter_for(checkpoint.config, checkpoint.tensors, vocabulary_of(io)), io)


@pytest.mark.parametrize("case", GGUF)
def test_gguf_case(case, fixtures):
    folder = fixtures / "gguf" / case
    io, _ = read(folder / "io.safetensors")
    checkpoint = load_checkpoint(folder / "model.gguf")
    with GGUFFile.open(fixtures / "gguf/target_nk2_nv4.gguf") as target:
        vocabulary = Vocabulary(target.tensor("token_embd.weight"), target.tensor("output.weight"))
    run_steps(drafter_for(checkpoint.config, checkpoint.tensors, vocabulary), io)


@pytest.mark.parametrize("case", ["dflash", "dflash2", "dspark"])
def test_gguf_and_folder_give_the_same_bits(case, fixtures):
    folder = fixtures / "gguf" / case
    io, _ = read(folder / "io.safetensors")
    with GGUFFile.open(fixtures / "gguf/target_nk2_nv4.gguf") as target:
        vocabulary = Vocabulary(target.tensor("token_embd.weight"), target.tensor("output.weight"))
    outs = []
    for path in (folder, folder / "model.gguf"):
        checkpoint = load_checkpoint(path)
        drafter = drafter_for(checkpoint.config, checkpoint.tensors, vocabulary)
        step = next(steps(io))
        drafter.commit(step["context"])
        outs.append(drafter.forward(step["anchor"], int(step["n_q"])))
    assert torch.equal(*outs)
