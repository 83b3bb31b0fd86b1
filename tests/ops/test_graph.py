"""Graphs of operator calls: what is recorded, what a replay reads and writes, what is refused."""

import gc
import threading

import pytest
import torch

from torch_dflash import ops


def record(run):
    ops.graph_begin()
    try:
        result = run()
    finally:
        handle = ops.graph_end()
    return result, handle


def two_steps(x, residual, weight):
    y = ops.add_rms_norm(x, residual, weight, 1e-6, False, 0)
    return ops.quant_act(y, 1), ops.head_topk(y, 2, 1.0, 0.0)


def arguments(seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(3, 96, generator=g) for _ in range(2)] + [torch.ones(96)]


def test_a_replay_is_the_calls_on_the_values_of_now():
    x, residual, weight = arguments()
    (act, (values, ids)), handle = record(lambda: two_steps(x, residual, weight))
    for seed in (1, 2):
        new_x, new_residual, _ = arguments(seed)
        x.copy_(new_x)
        residual.copy_(new_residual)
        expected_act, (expected_values, expected_ids) = two_steps(new_x, new_residual, weight)
        ops.graph_replay(handle)
        assert torch.equal(act, expected_act)
        assert torch.equal(values, expected_values)
        assert torch.equal(ids, expected_ids)
        assert torch.equal(residual, new_residual)  # written by both
    ops.graph_free(handle)


def test_recording_runs_the_calls_and_keeps_their_tensors():
    x, residual, _ = arguments()
    before = residual.clone()
    (act, _), handle = record(lambda: two_steps(x, residual, torch.ones(96)))
    assert torch.equal(residual, before + x)
    expected = act.clone()
    residual.copy_(before)
    del act  # the graph holds it, and the weight
    gc.collect()
    ops.graph_replay(handle)
    assert torch.equal(residual, before + x)
    act, _ = two_steps(x, before, torch.ones(96))
    assert torch.equal(act, expected)
    ops.graph_free(handle)


def test_bytes_are_those_of_the_results():
    _, handle = record(lambda: two_steps(*arguments()))
    normed, packed, top = 3 * 96 * 4, 3 * ops.act_bytes(96, 1), 3 * 2 * (4 + 8)
    assert ops.graph_bytes(handle) == normed + packed + top
    ops.graph_free(handle)


def test_an_error_of_a_replayed_operator_comes_through():
    table = torch.zeros(4, 34, dtype=torch.uint8)
    ids = torch.zeros(2, dtype=torch.int64)
    _, handle = record(lambda: ops.embed_rows(table, 8, ids, 1.0))
    ids.fill_(9)
    with pytest.raises(RuntimeError, match="embed_rows: ids must be"):
        ops.graph_replay(handle)
    ids.fill_(1)
    ops.graph_replay(handle)
    ops.graph_free(handle)


def test_what_failed_while_recording_is_not_part_of_the_graph():
    ops.graph_begin()
    with pytest.raises(RuntimeError, match="ids must be"):
        ops.embed_rows(torch.zeros(4, 34, dtype=torch.uint8), 8, torch.tensor([9]), 1.0)
    handle = ops.graph_end()
    assert ops.graph_bytes(handle) == 0
    ops.graph_replay(handle)
    ops.graph_free(handle)


def test_misuse_is_named():
    with pytest.raises(RuntimeError, match="graph_end: no graph is being recorded"):
        ops.graph_end()
    ops.graph_begin()
    with pytest.raises(RuntimeError, match="graph_begin: a graph is being recorded"):
        ops.graph_begin()
    with pytest.raises(RuntimeError, match="graph_replay: a graph is being recorded"):
        ops.graph_replay(1)
    handle = ops.graph_end()
    ops.graph_free(handle)
    for call in (ops.graph_replay, ops.graph_bytes, ops.graph_free):
        with pytest.raises(RuntimeError, match=f"handle must be one of graph_end .* got {handle}"):
            call(handle)


def test_two_threads_replay_one_graph_in_turn_or_are_refused():
    """The results of different calls have different sizes: mixed up, they would be overrun."""

    def run():
        for columns in (256, 8, 4096, 16):
            ops.quant_act(torch.ones(64, columns), 1)

    _, handle = record(run)
    said, ran = set(), []

    def work():
        for _ in range(300):
            try:
                ops.graph_replay(handle)
                ran.append(1)
            except RuntimeError as error:
                said.add(str(error).split("dflash::")[1].split(", got")[0])

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ops.graph_replay(handle)  # it is free again
    ops.graph_free(handle)
    assert ran
    assert said <= {"graph_replay: handle must not be replayed by two threads at once"}


def test_a_replay_that_failed_lets_the_next_run():
    x = torch.zeros(1, 4)
    _, handle = record(lambda: ops.head_topk(x, 1, 1.0, 0.0))
    for _ in range(2):
        x.fill_(float("nan"))
        with pytest.raises(RuntimeError, match="logits must not hold NaN"):
            ops.graph_replay(handle)
    x.fill_(1.0)
    ops.graph_replay(handle)
    ops.graph_free(handle)
