"""Hybrid targets from GGUF against transformers: logits, states after every row, rollback."""

import pytest
import torch
from safetensors.torch import load_file

from torch_dflash.models import load_target

LOGITS, GDN_STATE, CONV_STATE = 2e-4, 5e-6, 2e-5  # absolute, from the fixtures' README
CASES = {
    "nk2_nv6": "target_nk2_nv6",
    "nk2_nv4": "target_nk2_nv4",
    "nk3_nv3_tied": "target_nk3_nv3_tied",
    "types_nk2_nv4": "target_types_nk2_nv4",
    "fused": "target_fused_qkv_f16",
    "mtp": "target_mtp_bf16",
}
REFERENCE = {"fused": "nk2_nv4", "mtp": "nk2_nv4"}


def close(actual, expected, tolerance):
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


@pytest.fixture(params=CASES)
def case(request, fixtures):
    io = load_file(
        fixtures / "hybrid" / REFERENCE.get(request.param, request.param) / "io.safetensors"
    )
    return io, fixtures / "gguf" / f"{CASES[request.param]}.gguf"


@pytest.fixture(params=["journal", "snapshots"])
def target(request, case):
    return load_target(case[1], state=request.param)


def test_logits_and_layer_outputs(target, case):
    io, _ = case
    layers = range(target.num_layers - 1)
    target.capture(layers)
    seen = target.verify(io["ids"])
    close(seen.logits, io["logits"], LOGITS)
    columns = seen.target_hidden.view(len(io["ids"]), target.num_layers - 1, -1)
    for i in layers:
        close(columns[:, i], io[f"layer_out.{i}"], LOGITS)


def test_prefill_equals_one_row_at_a_time(target, case):
    io, _ = case
    rows = []
    for token in io["ids"]:
        rows.append(target.verify(token.view(1)).logits)
        target.commit(1)
    close(torch.cat(rows), io["logits"], LOGITS)
    target.reset()
    assert torch.equal(target.prefill(io["ids"]), rows[-1])


def test_greedy(target, case):
    io, _ = case
    logits = target.prefill(io["ids"])
    tokens = []
    for _ in io["greedy"]:
        tokens.append(int(logits.argmax()))
        logits = target.verify(torch.tensor(tokens[-1:])).logits
        target.commit(1)
    assert tokens == io["greedy"].tolist()


def test_rounds_of_verification_and_rollback(target, case):
    io, _ = case
    target.prefill(io["ids"])
    for r in range(100):
        if f"round{r}.rows" not in io:
            break
        seen = target.verify(io[f"round{r}.rows"])
        close(seen.logits, io[f"round{r}.logits"], LOGITS)
        target.commit(int(io[f"round{r}.keep"]))
    assert r >= 5
    assert target.length == len(io["final.committed"])
    recurrent = target.state.recurrent
    slot = int(recurrent.begin_prefill())
    layers = [i for i, layer in enumerate(target.layers) if hasattr(layer.mixer, "conv")]
    nk = recurrent.state[0].shape[1], target.layers[layers[0]].mixer.shape.k_heads
    for index, layer in enumerate(layers):
        if f"final.gdn_state.{layer}" not in io:
            continue
        expected = io[f"final.gdn_state.{layer}"]  # [nv, dk, dv], grouped heads
        nv, k_heads = nk
        tiled = (
            expected.view(k_heads, nv // k_heads, *expected.shape[1:]).transpose(0, 1).flatten(0, 1)
        )
        close(recurrent.state[index][slot], tiled.transpose(1, 2), GDN_STATE)
