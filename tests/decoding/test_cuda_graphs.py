"""Passes under a recorder that runs nothing while it records and shares memory: a CUDA graph's way.

Without a GPU a stand-in takes its place: CPU graphs whose recording is undone, and whose runs spoil
the results of all others of the pool, as graphs with shared memory may.
"""

import pytest
import torch

from torch_dflash import ops
from torch_dflash.decoding import graphs as module
from torch_dflash.decoding.graphs import StepGraphs
from torch_dflash.decoding.kv_cache import KVCache
from torch_dflash.decoding.loop import Session
from torch_dflash.decoding.recorders import CpuRecorder, recording_seconds
from torch_dflash.decoding.sampling import SamplingParams
from torch_dflash.load import load_drafter, load_target
from torch_dflash.testing.tiny import tiny_drafter, tiny_hybrid

KINDS = ("dflash", "dflash2", "dspark")
SAMPLED = SamplingParams(0.8, 20, 0.9, seed=3)


class StandIn(CpuRecorder):
    runs = False

    def __init__(self, pool, state):
        super().__init__()
        self.pool, self.state, self.results = pool, state, []
        pool.append(self)

    def begin(self):
        self.before = [t.clone() for t in self.state()]
        super().begin()

    def end(self):
        super().end()
        self.bytes = 0
        for tensor, before in zip(self.state(), self.before, strict=True):
            tensor.copy_(before)

    def replay(self):
        for other in self.pool:
            for tensor in other.results if other is not self else ():
                tensor.fill_(torch.nan if tensor.is_floating_point() else 77)
        super().replay()


def tensors(value):
    leaves = torch.utils._pytree.tree_leaves(value)
    return [t for t in leaves if isinstance(t, torch.Tensor)]


def state_of(model):
    """What a pass changes."""
    caches = [model.cache] if hasattr(model, "cache") else [model.state.kv]
    found = [t for c in caches for t in (*c.k, *c.v)]
    recurrent = getattr(getattr(model, "state", None), "recurrent", None)
    return found + tensors(list(vars(recurrent).values()) if recurrent is not None else [])


@pytest.fixture
def stand_in(monkeypatch):
    """Models made in here record by stand-ins."""

    class Pass(module._Pass):
        def __init__(self, recorder, *args):
            super().__init__(recorder, *args)
            recorder.results = tensors(self.result)

    monkeypatch.setattr(module, "_Pass", Pass)

    def use(graphs, state):
        pool = []
        graphs._recorder = lambda device: StandIn(pool, state)
        return pool

    return use


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cuda_graphs")
    tiny_hybrid(folder / "target.gguf", layers=6, interval=3, vocab=300)
    for kind in KINDS:
        shape = {"vocab": 300, "num_target_layers": 6, "target_layer_ids": (0, 3)}
        tiny_drafter(folder / kind, kind, **shape)
    return folder


@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("state", ["journal", "snapshots"])
def test_the_same_tokens_although_recording_runs_nothing(folder, stand_in, kind, state, sampling):
    said = []
    for recorded in (False, True):
        target = load_target(folder / "target.gguf", state=state)
        drafter = load_drafter(folder / kind, target)
        pools = [
            stand_in(part.graphs, lambda p=part: state_of(p)) if recorded else []
            for part in (target, drafter)
        ]
        target.graphs.enabled = drafter.graphs.enabled = recorded
        session = Session(target, drafter)
        said.append([session.generate([5, 17, n], 40, sampling).tokens for n in (2, 9)])
        assert all(len(pool) >= 2 for pool in pools) == recorded
    assert said[0] == said[1]


def test_recording_is_no_part_of_a_step(folder, stand_in, monkeypatch):
    target = load_target(folder / "target.gguf")
    stand_in(target.graphs, lambda: state_of(target))
    clock = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    begin, replay = StandIn.begin, StandIn.replay

    def slow(real, seconds):
        def call(self):
            clock[0] += seconds
            return real(self)

        return call

    monkeypatch.setattr(StandIn, "begin", slow(begin, 100.0))
    monkeypatch.setattr(StandIn, "replay", slow(replay, 1.0))
    before = recording_seconds()
    stats = Session(target).generate([5, 17, 2], 11).stats
    assert recording_seconds() - before == 100.0  # one width
    assert stats.decode_seconds == 10.0
    assert stats.step_seconds == {1: [1.0] * 10}


def test_replays_follow_their_arguments(stand_in):
    graphs, cache = StepGraphs(), KVCache(1, 1, 8)
    stand_in(graphs, lambda: [])

    def run(data, rows):
        return ops.uniform(data, rows.positions, 0), ops.uniform(data, rows.following, 1)

    for start in (0, 7, 3):
        data = torch.tensor([start, 5])
        got = graphs.run("x", data, cache, start, run)
        for stream in (0, 1):
            where = torch.arange(start, start + 2) + stream
            assert torch.equal(got[stream], ops.uniform(data, where, stream))


def test_an_error_in_a_recording_leaves_none_behind(stand_in):
    graphs, cache = StepGraphs(), KVCache(1, 1, 8)
    stand_in(graphs, lambda: [])
    for _ in range(2):
        with pytest.raises(RuntimeError, match="consist of our operators"):
            graphs.run("x", torch.ones(2, 3), cache, 0, lambda data, rows: data * 2)
    x = torch.randn(2, 16)
    assert torch.equal(graphs.run("y", x, cache, 0, lambda data, rows: ops.quant_act(data, 0)), x)


def test_passes_of_a_cleared_model_get_a_new_pool(monkeypatch):
    """CUDA refuses to join a pool whose graphs are all gone."""
    made = []
    monkeypatch.setattr(module, "Pool", lambda device: made.append(device) or object())
    monkeypatch.setattr(module, "CudaRecorder", lambda pool: pool)
    graphs, gpu = StepGraphs(), torch.device("cuda", 0)
    first = graphs._recorder(gpu)
    assert graphs._recorder(gpu) is first
    graphs.clear()
    assert graphs._recorder(gpu) is not first
    assert made == [gpu, gpu]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("state", ["journal", "snapshots"])
def test_cuda_graphs_give_the_tokens_of_eager_passes(folder, kind, state, sampling):
    said = []
    for recorded in (False, True):
        target = load_target(folder / "target.gguf", state=state).to("cuda")
        drafter = load_drafter(folder / kind, target).to("cuda")
        target.graphs.enabled = drafter.graphs.enabled = recorded
        session = Session(target, drafter)
        said.append([session.generate([5, 17, n], 300, sampling).tokens for n in (2, 9)])
        if recorded:
            target.to("cpu")  # frees the graphs; the next sequence records its own
            target.to("cuda")
            said.append([session.generate([5, 17, n], 300, sampling).tokens for n in (2, 9)])
    assert said[0] == said[1]
    assert said[1] == said[2]
