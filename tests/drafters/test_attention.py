import json

import pytest

from torch_dflash.drafters.attention import LayerAttention, attention_from_gguf, attention_from_hf
from torch_dflash.fields import CheckpointError, Fields

TYPES = {"S": "sliding_attention", "F": "full_attention"}


def resolve(types=None, speculators=False, layers=2, dflash=None, notes=None, **top):
    if types is not None:
        top["layer_types"] = [TYPES[t] for t in types]
    fields = Fields("config.json", [("dflash_config.", dflash or {}), ("", top)])
    out = attention_from_hf(fields, layers, speculators)
    if notes is not None:
        notes += fields.notes
    return [(layer.window, layer.causal) for layer in out]


def from_gguf(arch="dflash", selector=False, layers=2, notes=None, **keys):
    meta = {f"{arch}.attention.{k}": v for k, v in keys.items()}
    fields = Fields("x.gguf", [("", meta)])
    out = attention_from_gguf(fields, arch, layers, selector)
    if notes is not None:
        notes += fields.notes
    return [(layer.window, layer.causal) for layer in out]


def test_every_row_of_the_reference(fixtures):
    """432 combinations as vLLM resolves them; none differs (A2 and B2 lie outside of the table)."""
    rows = json.loads((fixtures / "config/attention.json").read_text())
    assert len(rows) == 432
    for types, is_causal, dflash, window, want in rows:
        keys = {"is_causal": is_causal, "sliding_window": window}
        if "error" in want:
            with pytest.raises(CheckpointError, match=r"sliding_window or .* must be present"):
                resolve(types, dflash=dflash, **keys)
        else:
            assert resolve(types, dflash=dflash, **keys) == [tuple(w) for w in want]


@pytest.mark.parametrize(
    "non_causal,want",
    [(False, [(9, True), (None, False)]), (True, [(9, False), (None, False)])],
)
def test_speculators_full_layers_are_never_causal(non_causal, want):
    keys = {"sliding_window": 9, "sliding_window_non_causal": non_causal}
    assert resolve("SF", speculators=True, **keys) == want


def test_speculators_without_the_key_is_not_causal():
    assert resolve("SF", speculators=True, sliding_window=9) == [(9, False), (None, False)]
    assert resolve("SF", speculators=True, sliding_window=9, is_causal=True)[1] == (None, True)


def test_swa_window_size_wins_for_declared_layers():
    dflash = {"swa_window_size": 7, "use_swa": True}
    assert resolve("SF", dflash=dflash, sliding_window=9) == [(7, True), (None, False)]


def test_null_counts_as_absent():
    dflash = {"swa_window_size": None, "causal": None}
    assert resolve("SS", dflash=dflash, sliding_window=9) == [(9, True), (9, True)]


def test_unused_window_is_used_with_a_note():
    notes = []
    got = resolve("SS", sliding_window=9, use_sliding_window=False, is_causal=False, notes=notes)
    assert got == [(9, False), (9, False)]
    assert any("use_sliding_window is false" in n for n in notes)


def test_transformers_defaults():
    notes = []
    assert resolve("SS", use_sliding_window=True, notes=notes)[0] == (4096, True)
    assert any("window 4096" in n for n in notes)
    # max_window_layers 28: a drafter of 30 layers without layer_types slides from 28 on
    got = resolve(layers=30, use_sliding_window=True, sliding_window=9)
    assert got[27:] == [(None, False), (9, True), (9, True)]
    assert resolve(use_sliding_window=True, sliding_window=9) == [(None, False)] * 2


@pytest.mark.parametrize(
    "keys,message",
    [
        ({"layer_types": ["full_attention"]}, r"layer_types must have 2 entries, got 1"),
        ({"layer_types": ["linear", "linear"]}, r"layer_types\[0\] must be 'full_attention' or"),
        ({"types": "SS", "sliding_window": 0}, r"sliding_window must be at least 1, got 0"),
        ({"types": "SS", "sliding_window": 9.5}, r"sliding_window must be an integer, got 9.5"),
        ({"is_causal": "no"}, r"is_causal must be true or false, got 'no'"),
    ],
)
def test_malformed(keys, message):
    with pytest.raises(CheckpointError, match=message):
        resolve(**keys)


ALL, MIXED = [True, True], [True, False]


def test_row_25_noncausal_all_sliding():
    keys = {"sliding_window": 2048, "sliding_window_pattern": ALL}
    assert from_gguf(**keys, causal=False) == [(2048, False)] * 2
    assert from_gguf(**keys, causal=True) == [(2048, True)] * 2


@pytest.mark.parametrize(
    "arch,selector,pattern,causal",
    [
        ("dflash", False, ALL, [False, False]),
        ("dflash", False, MIXED, [True, False]),
        ("dflash", True, MIXED, [True, False]),
        ("qwen35-dflash-draft", False, ALL, [True, True]),
        ("qwen35-dflash-draft", True, ALL, [False, False]),
        ("qwen35-dflash-draft", False, MIXED, [True, False]),
    ],
)
def test_gguf_without_a_causal_key(arch, selector, pattern, causal):
    notes = []
    keys = {"sliding_window": 9, "sliding_window_pattern": pattern}
    got = from_gguf(arch, selector, notes=notes, **keys)
    assert [c for _, c in got] == causal
    assert [w for w, _ in got] == [9 if p else None for p in pattern]
    assert len(notes) == 1
    assert "causal is absent" in notes[0]


def test_gguf_own_pattern_and_integers():
    keys = {"sliding_window": 9, "sliding_window_pattern": [1, 0]}
    assert from_gguf(**keys, causal_pattern=[False, True]) == [(9, False), (None, True)]


def test_gguf_without_windows():
    assert from_gguf() == [(None, False)] * 2
    assert from_gguf(sliding_window=0) == [(None, False)] * 2


@pytest.mark.parametrize(
    "keys,message",
    [
        ({"sliding_window": 9}, "sliding_window_pattern must say which layers"),
        ({"sliding_window_pattern": ALL}, "sliding_window must be present for sliding layers"),
        ({"sliding_window": 9, "sliding_window_pattern": [True]}, "must have 2 entries, got 1"),
        ({"sliding_window": 9, "sliding_window_pattern": [2, 3]}, r"\[0\] must be true or false"),
        ({"sliding_window": 9, "sliding_window_pattern": 4}, "must be a list, got 4"),
        ({"causal": 1}, "attention.causal must be true or false, got 1"),
    ],
)
def test_gguf_malformed(keys, message):
    with pytest.raises(CheckpointError, match=message):
        from_gguf(**keys)


def test_layer_attention_is_a_value():
    assert LayerAttention(9, True) == LayerAttention(window=9, causal=True)
    assert hash(LayerAttention(None, False)) == hash(LayerAttention(None, False))
