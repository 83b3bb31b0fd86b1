import json

import pytest
from gguf import GGUFReader, GGUFValueType, GGUFWriter

from torch_dflash.drafters.from_gguf import config_from_gguf
from torch_dflash.drafters.from_hf import config_from_hf
from torch_dflash.drafters.layer_ids import (
    default_layer_ids,
    layer_ids_from_gguf,
    layer_ids_from_hf,
)
from torch_dflash.drafters.resolve import Overrides
from torch_dflash.fields import CheckpointError, Fields


def gguf_ids(arch="dflash", **keys):
    meta = {f"{arch}.{k.replace('__', '.')}": v for k, v in keys.items()}
    return layer_ids_from_gguf(Fields("x.gguf", [("", meta)]), arch)


def hf_ids(dflash=None, **top):
    return layer_ids_from_hf(Fields("c", [("dflash_config.", dflash or {}), ("", top)]))


def test_default_ids_match_the_reference(fixtures):
    table = json.loads((fixtures / "config/default_layer_ids.json").read_text())
    assert len(table) >= 72
    for key, want in table.items():
        depth, count = map(int, key.split(","))
        assert default_layer_ids(depth, count) == tuple(want)


@pytest.mark.parametrize(
    "depth,ids",
    [
        (64, (1, 16, 31, 46, 61)),
        (36, (1, 9, 17, 25, 33)),
        (52, (1, 13, 25, 37, 49)),
        (40, (1, 10, 19, 28, 37)),
        (40, (1, 6, 11, 16, 22, 27, 32, 37)),
    ],
)
def test_default_ids_of_published_drafters(depth, ids):
    assert default_layer_ids(depth, len(ids)) == ids


def test_row_16_capture_layers_from_drafter(hf, shapes_of):
    config = hf(num_target_layers=64, d_target_layer_ids=[4, 16, 28, 40, 52])
    config = config_from_hf(config, shapes_of(config))
    assert config.target_layer_ids == (4, 16, 28, 40, 52)
    assert config.sources["target_layer_ids"] == "dflash_config.target_layer_ids"


def test_row_57_ids_in_both_layouts(hf, gguf, shapes_of):
    shapes = shapes_of(hf())
    upstream = config_from_gguf(gguf(), shapes)
    lucebox = gguf(
        arch="qwen35-dflash-draft", target_layers=None, dflash__target_layer_ids=[1, 4, 9]
    )
    lucebox = config_from_gguf(lucebox, shapes)
    assert upstream.target_layer_ids == lucebox.target_layer_ids == (1, 4, 9)
    assert upstream.sources["target_layer_ids"] == "dflash.target_layers - 1"
    assert gguf_ids(target_layers=[2, 5], target_layer_ids=[1, 4]) == (1, 4)
    with pytest.raises(CheckpointError, match=r"must agree with dflash.target_layers - 1"):
        gguf_ids(target_layers=[2, 5], target_layer_ids=[2, 5])


@pytest.mark.parametrize("kind", ["INT32", "UINT32", "INT64", "UINT64"])
def test_row_60_int64_target_layer_ids(tmp_path, kind):
    arch = "qwen35-dflash-draft"
    path, key = tmp_path / "x.gguf", f"{arch}.dflash.target_layer_ids"
    writer = GGUFWriter(path, arch)
    writer.add_key_value(key, [4, 16, 28], GGUFValueType.ARRAY, GGUFValueType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    meta = {k: f.contents() for k, f in GGUFReader(path).fields.items()}
    assert layer_ids_from_gguf(Fields(str(path), [("", meta)]), arch) == (4, 16, 28)


def test_hf_spellings():
    assert hf_ids({"target_layer_ids": [3, 1]}) == (3, 1)
    assert hf_ids(target_layer_ids=[1, 3]) == (1, 3)
    assert hf_ids(dspark_target_layer_ids=[1, 3]) == (1, 3)
    assert hf_ids(aux_hidden_state_layer_ids=[2, 4]) == (1, 3)
    assert hf_ids(eagle_aux_hidden_state_layer_ids=[2, 4]) == (1, 3)
    assert hf_ids({"layer_ids": [2, 4]}) == (1, 3)
    assert hf_ids({"target_layer_ids": None}, target_layer_ids=[5]) == (5,)
    assert hf_ids() is None
    with pytest.raises(CheckpointError, match=r"must agree with aux_hidden_state_layer_ids - 1"):
        hf_ids({"target_layer_ids": [1, 3]}, aux_hidden_state_layer_ids=[1, 3])
    with pytest.raises(CheckpointError, match="target_layers does not say"):
        hf_ids(target_layers=[8, 24])


def test_absent_ids_take_the_default_rule(hf, gguf, shapes_of):
    config = hf(num_target_layers=64)
    shapes = shapes_of(config)
    config["dflash_config"]["target_layer_ids"] = None
    resolved = config_from_hf(config, shapes)
    assert resolved.target_layer_ids == (1, 31, 61)
    assert any("default rule" in n for n in resolved.notes)
    meta = gguf(arch="qwen35-dflash-draft", target_layers=None)
    with pytest.raises(CheckpointError, match="the default ids need its depth"):
        config_from_gguf(meta, shapes)
    resolved = config_from_gguf(meta, shapes, overrides=Overrides(num_target_layers=64))
    assert resolved.target_layer_ids == (1, 31, 61)


@pytest.mark.parametrize(
    "ids,message",
    [
        ([], "must name at least one layer"),
        ([1, 1, 9], "must not repeat a layer"),
        ([-1, 4, 9], "must be at least 0"),
        ([1, 4, 11], "must be below 11"),  # the last layer: pre- or post-norm by engine
        ([1, 4, 12], "must be below 11"),
        ([1, 4], "must fill the 192 columns of fc.weight, got 2 layers of 64"),
        ([1, 4, 9.0], r"target_layer_ids\[2\] must be an integer, got 9.0"),
        ("1,4,9", "must be a list, got '1,4,9'"),
    ],
)
def test_impossible_ids(hf, shapes_of, ids, message):
    config = hf()
    shapes = shapes_of(config)
    config["dflash_config"]["target_layer_ids"] = ids
    with pytest.raises(CheckpointError, match=message):
        config_from_hf(config, shapes)


def test_order_is_kept(hf, shapes_of):
    config = hf(d_target_layer_ids=[0, 2, 1])
    resolved = config_from_hf(config, shapes_of(config))
    assert resolved.target_layer_ids == (0, 2, 1)
    assert any("not increasing" in n for n in resolved.notes)
