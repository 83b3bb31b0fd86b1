"""Recorded passes: the same bits as eager ones, and never a stale one."""

import pytest
import torch

from torch_dflash import ops, switch
from torch_dflash.decoding.graphs import StepGraphs
from torch_dflash.decoding.kv_cache import KVCache
from torch_dflash.decoding.loop import Session
from torch_dflash.decoding.sampling import SamplingParams
from torch_dflash.load import load_drafter, load_target
from torch_dflash.testing.tiny import tiny_drafter, tiny_hybrid

KINDS = ("dflash", "dflash2", "dspark")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("graphs")
    tiny_hybrid(folder / "target.gguf", layers=6, interval=3, vocab=300)
    for kind in KINDS:
        shape = {"vocab": 300, "num_target_layers": 6, "target_layer_ids": (0, 3)}
        tiny_drafter(folder / kind, kind, **shape)
    return folder


def steps(folder, kind, graphs, tokens=300, state="journal"):
    """Logits and target_hidden of every verification, and the proposals; caches grow at 256."""
    target = load_target(folder / "target.gguf", state=state)
    drafter = load_drafter(folder / kind, target)
    target.graphs.enabled = drafter.graphs.enabled = graphs
    seen = []
    verify, propose = target.verify, drafter.propose

    def watched_verify(tokens):
        out = verify(tokens)
        seen.extend(out)
        return out

    def watched_propose(*args):
        out = propose(*args)
        seen.append(out.tokens)
        return out

    target.verify, drafter.propose = watched_verify, watched_propose
    result = Session(target, drafter).generate([5, 17, 2], tokens)
    return result.tokens, seen


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("state", ["journal", "snapshots"])
def test_recorded_and_eager_passes_give_the_same_bits(folder, kind, state):
    tokens, recorded = steps(folder, kind, True, state=state)
    eager_tokens, eager = steps(folder, kind, False, state=state)
    assert tokens == eager_tokens
    assert len(recorded) == len(eager) > 20
    for a, b in zip(recorded, eager, strict=True):
        assert torch.equal(a, b)  # every result is still what it was: none was overwritten


def test_passes_are_recorded_and_replayed(folder, monkeypatch):
    replays, kernel = [], ops.graph_replay
    monkeypatch.setattr(ops, "graph_replay", lambda h: (replays.append(h), kernel(h))[1])
    steps(folder, "dflash2", True, tokens=40)
    assert len(replays) > 20
    assert len(set(replays)) >= 3  # verify, draft, commit


def test_other_layers_are_captured_after_a_recording(folder):
    target = load_target(folder / "target.gguf")
    out = {}
    for ids in ([0], [3, 1], [1, 1], [0]):
        target.capture(ids)
        target.reset()
        target.prefill(torch.tensor([1, 2, 3]))
        for _ in range(2):
            out[tuple(ids)] = target.verify(torch.tensor([4, 5])).target_hidden
            target.commit(2)
    hidden = target.hidden_size
    assert out[3, 1].shape == out[1, 1].shape == (2, 2 * hidden)
    assert torch.equal(out[3, 1][:, hidden:], out[1, 1][:, :hidden])
    assert torch.equal(out[1, 1][:, hidden:], out[1, 1][:, :hidden])
    assert not torch.equal(out[3, 1][:, :hidden], out[1, 1][:, :hidden])
    assert not torch.equal(out[0,], out[1, 1][:, :hidden])


@pytest.mark.parametrize("kind", KINDS)
def test_a_target_that_moved_is_read_where_it_is(folder, kind):
    """Its embedding and head are the drafter's too, and no call of the drafter's tells it."""
    target = load_target(folder / "target.gguf")
    drafter = load_drafter(folder / kind, target)
    drafter.commit(torch.randn(3, drafter.config.target_hidden_columns))
    anchor = torch.tensor([5])

    def proposed():
        return drafter.propose(anchor, 4, SamplingParams()).tokens

    before = proposed()
    embed = target.vocabulary.embed
    embed.packed = embed.packed.flip(0)
    after = proposed()
    drafter.graphs.enabled = False
    assert torch.equal(after, proposed())
    assert not torch.equal(after, before)


def test_a_replaced_operator_runs_although_a_pass_was_recorded(folder):
    target = load_target(folder / "target.gguf")
    target.prefill(torch.tensor([1, 2, 3]))
    calls = []

    def step():
        target.verify(torch.tensor([4]))
        target.commit(1)

    step()
    kernel = ops.qmm
    with switch.replaced({"qmm": lambda *a: (calls.append(1), kernel(*a))[1]}):
        step()
    replaced = len(calls)
    step()
    assert len(calls) == replaced > 6
    assert not ops.REPLACED


def test_what_a_graph_cannot_see_is_refused():
    cache = KVCache(1, 1, 8)
    with pytest.raises(RuntimeError, match=r"consist of our operators, it ran aten\.mul"):
        StepGraphs().run("x", torch.ones(2, 3), cache, 0, lambda data, rows: data * 2)
    ops.graph_begin()  # recording has ended
    ops.graph_free(ops.graph_end())


def test_too_much_to_keep_runs_eagerly(monkeypatch):
    monkeypatch.setattr("torch_dflash.decoding.graphs._MOST_BYTES", 100)
    graphs, cache, calls = StepGraphs(), KVCache(1, 1, 8), []

    def run(data, rows):
        calls.append(rows.positions.tolist())
        return ops.quant_act(data, 0)

    for start in (0, 5):
        x = torch.randn(3, 16)
        assert torch.equal(graphs.run("x", x, cache, start, run), x)
    assert calls == [[0, 1, 2], [5, 6, 7]]


def test_rows_behind_the_data_stay():
    graphs, cache = StepGraphs(), KVCache(1, 1, 8)
    table = torch.arange(10.0).view(5, 2).view(torch.uint8)

    def run(ids, rows):
        return ops.embed_rows(table, 0, ids, 1.0), ops.uniform(rows.positions, rows.positions, 0)

    for anchor, start in ((1, 0), (4, 7)):
        tail = torch.tensor([3, 3])
        rows, _ = graphs.run("x", torch.tensor([anchor]), cache, start, run, tail)
        assert rows[:, 0].tolist() == [2.0 * anchor, 6.0, 6.0]
        where = torch.arange(start, start + 3)
        assert torch.equal(graphs._graphs["x", 3].result[1], ops.uniform(where, where, 0))


def positions_of_replays(graphs, cache, starts, count=3):
    def run(data, rows):
        return ops.uniform(rows.positions, rows.positions, 0)

    data = torch.zeros(count, dtype=torch.int64)
    return [graphs.run("x", data, cache, start, run).clone() for start in starts]


def uniforms(start, count=3):
    where = torch.arange(start, start + count)
    return ops.uniform(where, where, 0)


@pytest.mark.parametrize("at", ["add", "graph_replay"])
def test_an_interrupt_in_a_replay_does_not_shift_the_next(monkeypatch, at):
    graphs, cache = StepGraphs(), KVCache(1, 1, 8)
    positions_of_replays(graphs, cache, [0])
    owner = {"add": torch, "graph_replay": ops}[at]
    real = getattr(owner, at)

    def interrupted(*args, **kwargs):
        if at != "graph_replay":
            real(*args, **kwargs)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(owner, at, interrupted)
        with pytest.raises(KeyboardInterrupt):
            positions_of_replays(graphs, cache, [7])
    (got,) = positions_of_replays(graphs, cache, [9])
    assert torch.equal(got, uniforms(9))


@pytest.mark.parametrize("at", ["graph_begin", "graph_end"])
@pytest.mark.parametrize("done", [False, True])
def test_an_interrupt_while_recording_leaves_no_recording(monkeypatch, at, done):
    graphs, cache = StepGraphs(), KVCache(1, 1, 8)
    real = getattr(ops, at)

    def interrupted():
        if done:
            real()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ops, at, interrupted)
        with pytest.raises(KeyboardInterrupt):
            positions_of_replays(graphs, cache, [0])
    for got, start in zip(positions_of_replays(graphs, cache, [3, 5]), (3, 5), strict=True):
        assert torch.equal(got, uniforms(start))
    ops.graph_begin()  # nothing is being recorded any more
    ops.graph_free(ops.graph_end())


def test_a_recording_of_somebody_else_is_left_alone():
    graphs, cache = StepGraphs(), KVCache(1, 1, 8)
    ops.graph_begin()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="graph_begin: a graph is being recorded"):
            positions_of_replays(graphs, cache, [0])
    ops.graph_free(ops.graph_end())


def test_growth_that_fails_changes_nothing(monkeypatch):
    cache = KVCache(2, 1, 8)
    cache.reserve(10)
    before = [*cache.k, *cache.v, cache.positions, cache.counts]
    grown, calls = KVCache._grown, []

    def failing(old, capacity):
        calls.append(capacity)
        if len(calls) == 3:
            raise MemoryError
        return grown(old, capacity)

    monkeypatch.setattr(KVCache, "_grown", staticmethod(failing))
    with pytest.raises(MemoryError):
        cache.reserve(300)
    after = [*cache.k, *cache.v, cache.positions, cache.counts]
    assert all(a is b for a, b in zip(before, after, strict=True))
    cache.reserve(300)
    assert {t.shape[1] for t in (*cache.k, *cache.v)} == {cache.capacity} == {512}


def test_another_cache_of_the_same_size_is_recorded_anew():
    graphs = StepGraphs()
    caches = [KVCache(1, 1, 4) for _ in range(2)]
    freq = torch.zeros(2)

    def run(data, rows, cache):
        k = data.view(-1, 1, 4)
        ops.qk_norm_rope_store(
            None, k, k, None, None, 1e-6, False, rows.positions, freq, 1.0, [], rows.positions,
            cache.k[0], cache.v[0],
        )  # fmt: skip
        return rows.positions

    for value, cache in enumerate(caches, 1):
        for start in (0, 2):
            data = torch.full((2, 4), float(value))
            graphs.run("x", data, cache, start, lambda d, r, c=cache: run(d, r, c))
    for value, cache in enumerate(caches, 1):
        assert cache.k[0][0, :4].eq(value).all()
