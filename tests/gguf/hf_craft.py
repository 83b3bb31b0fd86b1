"""Random tiny drafters as Hugging Face folders, from nothing but a config."""

import json
import math

import torch
from safetensors.torch import save_file

from torch_dflash.drafters.from_hf import config_from_hf
from torch_dflash.drafters.tensors import tensor_table

HIDDEN, VOCAB, LAYERS, DEPTH = 64, 320, 2, 12
MARKOV = {"markov_rank": 32, "enable_confidence_head": True, "confidence_head_with_markov": True}
SELECTOR = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 32, "selector_top_k": 4}
ARCHITECTURES = {"dflash": "DFlashDraftModel", "dflash2": "DFlash2DraftModel"}


def config(kind, inner=(), **top):
    """A ``config.json`` of z-lab's layout; ``inner`` goes into ``dflash_config``."""
    made = {
        "architectures": [ARCHITECTURES.get(kind, "Qwen3DSparkModel")],
        "model_type": "qwen3",
        "hidden_size": HIDDEN,
        "intermediate_size": 96,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096,
        "num_target_layers": DEPTH,
        "is_causal": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7},
        "block_size": 8,
        "dflash_config": {"mask_token_id": 9, "target_layer_ids": [1, 4, 9]},
    }
    made["dflash_config"] |= {"dflash2": SELECTOR, "dspark": MARKOV}.get(kind, {}) | dict(inner)
    made |= top
    return {k: v for k, v in made.items() if v is not None}


def speculators(kind, **top):
    """The same drafter as speculators writes it."""
    flat = config(kind)
    top_only = ("architectures", "block_size", "dflash_config", "is_causal", "num_target_layers")
    inner = {k: v for k, v in flat.items() if k not in top_only}
    made = {
        "architectures": ["DSparkSpeculator" if kind == "dspark" else "DFlashSpeculator"],
        "speculators_model_type": kind,
        "transformer_layer_config": inner,
        "aux_hidden_state_layer_ids": [2, 5, 10],
        "mask_token_id": 9,
        "block_size": 8,
        "num_target_layers": DEPTH,
        **({"dflash2": SELECTOR, "dspark": MARKOV}.get(kind, {})),
        **top,
    }
    return {k: v for k, v in made.items() if v is not None}


def folder(path, made, *, dtype=torch.bfloat16, extra=(), shards=1, change=None):
    """Write the folder.

    Args:
        made: config.json.
        dtype: of the weights.
        extra: names of optional tensors to write as well.
        shards: number of files; more than one come with an index.
        change: called with the dict of tensors before they are written.
    """
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(made))
    table = tensor_table(config_from_hf(made))
    shapes = table.required | {n: table.optional[n] for n in extra}
    g = torch.Generator().manual_seed(len(shapes))
    tensors = {}
    for name, shape in shapes.items():
        if name == "d2t":
            ids = torch.randperm(VOCAB, generator=g)[: shape[0]].sort().values
            tensors[name] = ids - torch.arange(shape[0])
        else:
            values = torch.randn(shape, generator=g) / math.sqrt(shape[-1])
            tensors[name] = values.to(dtype)
    if change is not None:
        change(tensors)
    names = sorted(tensors)
    if shards == 1:
        save_file(tensors, path / "model.safetensors")
        return path
    index = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = {n: tensors[n] for n in names[i::shards]}
        save_file(part, path / file)
        index |= dict.fromkeys(part, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return path


def target_folder(path, *, vocab=VOCAB, hidden=HIDDEN, layers=DEPTH):
    """A target's ``config.json`` alone: enough to prepare a drafter for it."""
    path.mkdir(parents=True, exist_ok=True)
    text = {"hidden_size": hidden, "vocab_size": vocab, "num_hidden_layers": layers}
    (path / "config.json").write_text(json.dumps({"model_type": "x", "text_config": text}))
    return path
