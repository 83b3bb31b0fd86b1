"""GGUF targets in real engines: the native runner's tokens, the file's tokenizer, every refusal."""

import json
import sys
from pathlib import Path

import engines
import pytest
from gguf import GGMLQuantizationType as Q
from torch_dflash_vllm.gguf.folder import open_target
from torch_dflash_vllm.gguf.hf_config import hf_config

from torch_dflash.gguf import Typed
from torch_dflash.load import ASSETS, DRAFTERS
from torch_dflash.testing.tiny import tiny_hybrid
from torch_dflash.testing.tiny_dense import tiny_dense

EMBEDDED = ASSETS / "target.gguf"
PROMPTS = [[271, 300, 17, 5], [10, 20, 30, 40, 50, 60], [7, 411, 28], [*range(90, 130)]]
# vLLM rounds hidden states and logits to bfloat16: 8 bits, so logits of up to 16 lie 2^-4 apart
TIE = 2 * 2.0**-4


def split(run):
    """Per prompt: where the engine leaves the native runner, and how sure it was there."""
    for got, want in zip(run["engine"], run["native"], strict=True):
        pairs = enumerate(zip(got["tokens"], want, strict=True))
        at = next((i for i, (a, b) in pairs if a != b), None)
        yield at, None if at is None else got["margins"][at]


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """A Llama with all biases and rope factors; a tied Qwen3 with one tensor for q, k and v."""
    folder = tmp_path_factory.mktemp("dense")
    llama = tiny_dense(folder / "llama.gguf", "llama", bias=True, rope_factors=True)
    return llama, tiny_dense(folder / "qwen3.gguf", "qwen3", bias=True, tied=True, fused=True)


def test_dense_files_give_the_native_runners_tokens_in_float32(dense):
    """Llama's interleaved q and k rows, biases, rope factors, six types in one layer, tied head."""
    ran = engines.run(
        "gguf_jobs:beside_native", engines=[{"model": str(p)} for p in dense], prompts=PROMPTS,
        tokens=32,
    )  # fmt: skip
    assert [list(split(run)) for run in ran.value] == [[(None, None)] * len(PROMPTS)] * 2
    varied = {t for run in ran.value for r in run["native"] for t in r}
    assert len(varied) > 40  # a constant output would equal anything


@pytest.fixture(scope="module")
def hybrids(tmp_path_factory):
    """The embedded file, one with other types, and the embedded one in bfloat16."""
    types = {"ssm_beta.weight": int(Q.F32), "attn_gate.weight": int(Q.Q6_K)}
    path = tmp_path_factory.mktemp("hybrid") / "h.gguf"
    other = tiny_hybrid(path, ggml_type=int(Q.Q4_K), hidden=512, types=types)
    rounded = {"model": str(EMBEDDED), "dtype": "auto"}
    return engines.run(
        "gguf_jobs:beside_native",
        engines=[{"model": str(EMBEDDED)}, {"model": str(other)}, rounded],
        prompts=PROMPTS,
        tokens=64,
    ).value


def test_hybrids_give_the_native_runners_tokens_in_float32(hybrids):
    """Tiled V heads; the second file has float rows beside quants of what reads the same input."""
    assert [list(split(run)) for run in hybrids[:2]] == [[(None, None)] * len(PROMPTS)] * 2


def test_in_bfloat16_a_hybrid_differs_at_ties_only(hybrids):
    splits = list(split(hybrids[2]))
    assert all(margin is None or margin <= TIE for _, margin in splits), splits
    assert sum(at is None or at >= 3 for at, _ in splits) >= 3, splits


def test_with_each_drafter_the_tokens_stay():
    """Target and drafter from GGUF, verified rows through the same products as plain ones."""
    drafters = [{"method": "dflash", "model": str(ASSETS / f"{kind}.gguf")} for kind in DRAFTERS]
    ran = engines.run(
        "gguf_jobs:beside_native",
        engines=[{"model": str(EMBEDDED), "speculative_config": d} for d in drafters],
        prompts=PROMPTS,
        tokens=64,
    ).value
    assert [list(split(run)) for run in ran] == [[(None, None)] * len(PROMPTS)] * 3
    assert all(run["accepted"] > 64 for run in ran), [run["accepted"] for run in ran]


def test_a_librarys_product_in_prefills_and_nowhere_else():
    """The step decides: four prompts are prefilled together, then four rows decode together."""
    run = engines.run(
        "gguf_jobs:gemm_rows", env={"TORCH_DFLASH_GGUF_PREFILL": "gemm"},
        engine={"model": str(EMBEDDED)}, prompts=PROMPTS, tokens=16,
    ).value  # fmt: skip
    assert run["gemm"] == [sum(len(p) for p in PROMPTS)]
    assert run["operators"] == [len(PROMPTS)]
    # weights in float32, activations not packed to int8: errors of 1e-4 flip no wider margin
    assert all(margin is None or margin < 1e-3 for _, margin in split(run))


def test_a_librarys_product_in_long_steps_of_prefills_alone(tmp_path):
    """Hybrids count prefills, dense models know rows; what decodes besides keeps a step exact."""
    dense = tiny_dense(tmp_path / "qwen3.gguf", "qwen3")
    long = [[3 + (7 * i) % 250 for i in range(n)] for n in (150, 140)]
    later = [5 + (3 * i) % 250 for i in range(300)]
    for model in (EMBEDDED, dense):
        run = engines.run(
            "gguf_jobs:gemm_rows", env={"TORCH_DFLASH_GGUF_PREFILL": "auto"},
            engine={"model": str(model), "max_num_batched_tokens": 512},
            prompts=long, tokens=8, later=later,
        ).value  # fmt: skip
        assert run["gemm"] == [290]
        assert run["operators"] == [1, 2, 3, 302]


def test_words_are_the_files_own():
    texts = ["def f(x):\n    return x + 1  # héllo 你好", "import os\n"]
    ran = engines.run("gguf_jobs:words", engine={"model": str(EMBEDDED), "dtype": "auto"},
                      texts=texts)  # fmt: skip
    got = ran.value
    assert got["ids"] == got["own"]
    assert got["texts"] == got["decoded"]
    assert got["chat"] == got["own_chat"]
    assert got["ends"] == got["own_ends"] == [4092, 4094]
    assert got["served"] == str(EMBEDDED)
    assert got["dtype"] == "torch.bfloat16"


def test_two_ranks_give_the_tokens_of_one(tmp_path):
    """Rows, biases, a filled-up vocabulary; columns between quants, or inside by permission.

    The hybrid on two ranks, with a drafter: test_parallel.py.
    """
    llama = tiny_dense(tmp_path / "llama.gguf", "llama", bias=True, types={"attn_output": Q.Q5_K})
    ran = engines.run(
        "gguf_jobs:beside_native",
        engines=[{"model": str(llama), "tensor_parallel_size": 2}],
        env={"VLLM_CPU_OMP_THREADS_BIND": "0|1", "TORCH_DFLASH_GGUF_MISALIGNED": "dequantize"},
        prompts=PROMPTS,
        tokens=32,
    )
    assert list(split(ran.value[0])) == [(None, None)] * len(PROMPTS)
    assert "blk.1.attn_output.weight (Q5_K): columns [(128, 256)] cut quants of 256" in ran.log


@pytest.mark.parametrize("other_first", [False, True])
def test_vllm_gguf_plugin_beside_ours(dense, tmp_path, other_first):
    beside = Path(sys.prefix, "beside")
    if not beside.is_dir():
        pytest.skip(f"vllm-gguf-plugin is not in {beside}, where tools/vllm_env.py puts it")
    llama, _ = dense
    config = hf_config(*reversed(open_target(llama)))
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    ran = engines.run(
        "gguf_jobs:beside_other_plugin",
        folder=str(beside),
        ours={"model": str(llama), "quantization": "dflash_gguf"},
        theirs={"model": str(llama), "tokenizer": str(tmp_path), "dtype": "float16"},
        other_first=other_first,
    )
    assert ran.value["tokens"] == ran.value["native"]
    assert ran.value["ours"] == "dflash_gguf"
    assert ran.value["theirs"] == ["gguf", str(llama)]
    assert ran.log.count("is left to vllm-gguf-plugin") == 1


def cases(folder):
    """Engine arguments, and what the message must say."""
    llama = str(tiny_dense(folder / "llama.gguf", "llama"))
    narrow = str(tiny_dense(folder / "narrow.gguf", "qwen3", ffn=256 * 3))
    odd = str(tiny_dense(folder / "odd.gguf", "qwen3", heads=6, kv_heads=3, head_dim=128))
    moe = {"qwen3.expert_count": Typed("uint32", 8)}
    experts = tiny_dense(folder / "experts.gguf", "qwen3", metadata=moe)
    other = folder / "other.gguf"
    other.write_bytes(EMBEDDED.read_bytes().replace(b"qwen35", b"gemma9"))
    cut = folder / "cut.gguf"
    cut.write_bytes(EMBEDDED.read_bytes()[:-1000])
    text = folder / "text.gguf"
    text.write_bytes(b"not a model, but long enough to be looked at")
    (folder / "folder.gguf").mkdir()
    words = {"tokenizer.ggml.model": Typed("string", "llama")}
    pieces = tiny_dense(folder / "pieces.gguf", "llama", metadata=words)
    mixture = str(tiny_dense(folder / "mixture.gguf", "qwen3moe"))
    one = {"split.count": Typed("uint16", 1)}
    piece = tiny_dense(folder / "p-00001-of-00003.gguf", "llama", metadata=one)
    key = b"split.count\x02\0\0\0"  # the type's number, then the value
    piece.write_bytes(piece.read_bytes().replace(key + b"\x01", key + b"\x03"))
    strange = folder / "strange.gguf"
    strange.write_bytes(Path(llama).read_bytes().replace(b"blk.1.ffn_up", b"blk.1.ffn_xx"))
    drafter = str(ASSETS / "dflash.gguf")
    yield {"model": str(folder / "none.gguf")}, "--model must be a .gguf file", "nothing there"
    yield {"model": str(folder / "folder.gguf")}, "got a folder"
    yield {"model": str(text)}, "text.gguf", "GGUF"
    yield {"model": str(cut)}, "cut.gguf", "are missing", "incomplete"
    yield {"model": drafter}, "'dflash' is a drafter's"
    yield {"model": str(other)}, "must be one of qwen35, qwen3, llama, got 'gemma9'"
    yield {"model": mixture}, "got 'qwen3moe': it is a mixture of experts"
    yield (
        {"model": str(piece)},
        "must be one whole file, got one of 3 parts",
        "llama-gguf-split --merge",
    )
    yield {"model": str(strange)}, "only its own tensors, got 1 unknown: blk.1.ffn_xx.weight"
    yield {"model": str(experts)}, "qwen3.expert_count must be absent, got 8"
    yield {"model": str(pieces)}, "tokenizer.ggml.model must be 'gpt2'", "--tokenizer"
    yield {"model": llama, "quantization": "fp8"}, "--quantization must be dflash_gguf", "'fp8'"
    yield {"model": llama, "load_format": "safetensors"}, "--load-format must be auto or dflash"
    yield {"model": llama, "load_format": "dummy"}, "--load-format must be", "'dummy'"
    yield {"model": llama, "config_format": "mistral"}, "--config-format must be auto or hf"
    yield {"model": llama, "hf_config_path": str(folder)}, "--hf-config-path must be absent"
    yield {"model": llama, "enable_lora": True}, "--enable-lora must be False"
    yield {"model": llama, "cpu_offload_gb": 1}, "--cpu-offload-gb must be 0"
    yield {"model": llama, "dtype": "float8"}, "float8"
    yield {"model": llama, "tensor_parallel_size": 3}, "head_count 4 must be a multiple", "by 1, 2"
    yield {"model": odd, "tensor_parallel_size": 2}, "head_count_kv 3 must be a multiple or"
    yield {"model": narrow, "tensor_parallel_size": 2}, "blk.0.ffn_down.weight (Q6_K", "384 columns"
    yield {"model": str(EMBEDDED), "tensor_parallel_size": 4}, "head_count 2", "splits by 1, 2"
    yield {"model": str(folder), "quantization": "dflash_gguf"}, "for --quantization dflash_gguf"


def test_wrong_invocations_say_what_is_wrong(tmp_path):
    wanted = [(args, parts) for args, *parts in cases(tmp_path)]
    # offline, vLLM looks for a name that is no file in its cache before it asks anybody
    env = {"HF_HUB_OFFLINE": "0"}
    got = engines.run("gguf_jobs:refusals", env=env, cases=[args for args, _ in wanted]).value
    wrong = [
        (args, parts, message)
        for (args, parts), message in zip(wanted, got, strict=True)
        if not all(part in message for part in parts)
    ]
    assert not wrong, "\n".join(f"{a}\n  {p}\n  {m[:600]}" for a, p, m in wrong)
