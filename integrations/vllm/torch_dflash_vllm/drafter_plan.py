"""From ``--speculative-config`` and the target to the speculative config that vLLM runs.

Nothing here imports vLLM: what has to be known about it comes in as :class:`Target`.
"""

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, NoReturn

import torch

from torch_dflash.drafters.config import (
    DrafterConfig,
    check_against_target,
)
from torch_dflash.drafters.from_gguf import config_from_gguf, drafter_arch
from torch_dflash.drafters.from_hf import config_from_hf
from torch_dflash.drafters.mask_embedding import read_mask_embedding
from torch_dflash.drafters.names import logical_names
from torch_dflash.drafters.resolve import Overrides
from torch_dflash.fields import Fields
from torch_dflash.gguf import GGUFFile
from torch_dflash.hf import open_safetensors, read_config

from .drafter_cache import CACHE_MARK, folder_for

__all__ = ["ALIASES", "Drafter", "Target", "plan", "read_drafter"]

_log = logging.getLogger("vllm.torch_dflash")

WHERE: Final = "speculative_config"
_METHODS: Final = (None, "dflash", "dspark")
_VLLM_KEYS: Final = ("dspark_draft_topk",)
# Architecture names of drafters that vLLM's V1 runner takes for DFlash; ours run behind them.
ALIASES: Final = {"dflash2": "DFlashTD2DraftModel", "dspark": "DFlashTDSparkDraftModel"}


@dataclass(frozen=True)
class Target:
    """What a drafter has to know about its target and the engine.

    Attributes:
        hidden_size, vocab_size, num_layers: of the target.
        max_model_len: longest sequence that is served.
        dtype: of the engine's activations.
        tensor_parallel_size: ranks.
        v1_runner: vLLM's V1 model runner: CPU, or a GPU without Triton.
        chain_hook: the V2 runner asks a DSpark model for its drafts (vLLM 0.33).
        load_format: of the target's weights.
    """

    hidden_size: int
    vocab_size: int
    num_layers: int
    max_model_len: int
    dtype: torch.dtype
    tensor_parallel_size: int = 1
    v1_runner: bool = False
    chain_hook: bool = True
    load_format: str = "auto"


@dataclass(frozen=True)
class Drafter:
    """A drafter's file.

    Attributes:
        path: folder or ``.gguf`` file.
        config: what it says.
        names: logical name -> name in the file, of every tensor that is used.
        ignored: tensors that are not used.
        mask_embedding: whether ``mask_embedding.pt`` is there.
        extra: keys of config.json that only vLLM reads.
    """

    path: Path
    config: DrafterConfig
    names: Mapping[str, str]
    ignored: frozenset[str] = frozenset()
    mask_embedding: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def weights_fit(self) -> bool:
        """Whether vLLM can read the weights where they are: a folder, names and row order."""
        plain = self.path.is_dir() and self.config.rope_is_neox and not self.ignored - {"t2d"}
        return plain and all(k == v for k, v in self.names.items())


def plan(spec: Mapping[str, Any], target: Target) -> dict[str, Any] | None:
    """The speculative config that runs the drafter which ``spec`` names.

    Args:
        spec: as the user wrote it.
        target: its target.

    Returns:
        a new config, or None where the drafter is not ours to look at: another method, or a
        repository that is not on this machine.

    Raises:
        ValueError: the drafter is missing, damaged, not supported, not made for this target, or
            cannot run with these flags; the message says which and what to do.
    """
    method, model = spec.get("method"), spec.get("model")
    if not isinstance(model, str):
        return None
    path = Path(model).expanduser()
    is_gguf = path.suffix == ".gguf"
    if method not in _METHODS:
        if is_gguf:
            _fail(f"method must be dflash or dspark for a .gguf drafter, got {method!r}")
        return None
    if not path.exists():
        if is_gguf or path.is_absolute() or model.startswith((".", "~")):
            _fail(
                f"model must be a drafter's folder or .gguf file, got {model!r}, where nothing is; "
                "check the path"
            )
        if method is not None:
            _log.warning(
                "torch-dflash: drafter %s is fetched by vLLM: whether it fits the target is not "
                "checked; give its local folder to have it checked",
                model,
            )
        return None
    if method is None and not (is_gguf or _looks_like_drafter(path)):
        return None
    if (path / CACHE_MARK).exists():  # planned before: engines may ask twice
        return dict(spec)
    if path.is_dir() and read_config(path).get("quantization_config"):
        _log.warning("torch-dflash: drafter %s is quantized: left to vLLM, not checked", path)
        return None
    drafter = read_drafter(path, target)
    tokens = _check(drafter, spec, target)
    return dict(spec) | _config(drafter, spec, target, tokens)


def _config(
    drafter: Drafter, spec: Mapping[str, Any], target: Target, tokens: int
) -> dict[str, Any]:
    kind = drafter.config.kind
    changes: dict[str, Any] = {
        "model": str(_folder(drafter, target)),
        "method": "dspark" if kind == "dspark" and not target.v1_runner else "dflash",
        "num_speculative_tokens": tokens,
    }
    if target.v1_runner and spec.get("draft_sample_method", "greedy") == "greedy":
        changes["use_local_argmax_reduction"] = True  # vLLM then asks our heads for the tokens
    if target.load_format in ("gguf", "dflash_gguf") and not spec.get("draft_load_config"):
        # vLLM would read the drafter with the target's loader
        changes["draft_load_config"] = {"load_format": "auto"}
    return changes


def _folder(drafter: Drafter, target: Target) -> Path:
    """A folder that vLLM loads, whose config spells out every decision that was made here."""
    config = drafter.config
    alias = ALIASES.get(config.kind) if target.v1_runner else None
    trained = config.context_length
    if trained is None:
        _fail(
            f"{drafter.path}: max_position_embeddings must be in its config, got a drafter that "
            "does not say how long a text it was trained for"
        )
    longest = max(trained, target.max_model_len)
    if longest > trained:
        # The rotation does not depend on this number, but vLLM sizes its table of angles by it.
        _log.warning(
            "torch-dflash: %s was trained for %d positions, max_model_len is %d: expect fewer "
            "accepted tokens beyond %d",
            drafter.path,
            trained,
            target.max_model_len,
            trained,
        )
    return folder_for(
        drafter.path,
        config,
        link=drafter.weights_fit,
        extra=drafter.extra,
        architecture=alias,
        context_length=longest,
        num_target_layers=target.num_layers,
        dtype=torch.float32 if target.dtype == torch.float32 else torch.bfloat16,
        vocab_size=target.vocab_size,
    )


def read_drafter(path: Path, target: Target) -> Drafter:
    """A drafter's config and tensor names, without its weights.

    Raises:
        CheckpointError, GGUFError: the file is damaged or holds something else.
    """
    overrides = Overrides(num_target_layers=target.num_layers, vocab_size=target.vocab_size)
    if path.is_dir():
        raw = read_config(path)
        stored = open_safetensors(path, check=False)
        names = logical_names(str(path), stored, gguf=False)
        for key in ("embed_tokens", "lm_head"):
            if raw.get(f"has_{key}") is False:
                names.pop(f"{key}.weight", None)
        mask = read_mask_embedding(path / "mask_embedding.pt")
        if mask is not None:
            overrides = replace(overrides, fallback_mask_token_id=mask.token_id)
        shapes = {logical: stored[name].shape for logical, name in names.items()}
        where = str(path / "config.json")
        config = config_from_hf(raw, shapes, where=where, tensors_in=str(path), overrides=overrides)
        extra = {k: raw[k] for k in _VLLM_KEYS if raw.get(k) is not None}
        ignored = frozenset(stored.keys() - set(names.values()))
        return Drafter(path, config, names, ignored, mask is not None, extra)
    if path.suffix != ".gguf":
        _fail(f"model must be a drafter's folder or .gguf file, got the file {str(path)!r}")
    with GGUFFile.open(path) as file:
        drafter_arch(Fields(str(path), [("", file.metadata)]))
        names = logical_names(str(path), file.tensors, gguf=True)
        shapes = {logical: file.tensors[name].shape for logical, name in names.items()}
        config = config_from_gguf(file.metadata, shapes, where=str(path), overrides=overrides)
    return Drafter(path, config, names)


def _looks_like_drafter(path: Path) -> bool:
    if not (path / "config.json").is_file():
        return False
    architectures = read_config(path).get("architectures")
    names = architectures if isinstance(architectures, list) else []
    return any(re.search(r"DFlash|DSpark", str(n)) for n in names)


def _check(drafter: Drafter, spec: Mapping[str, Any], target: Target) -> int:
    """Refuse what could not run or would run as something else; the number of draft tokens."""
    config, where = drafter.config, str(drafter.path)
    check_against_target(config, target, where)
    if config.kind == "dspark" and spec.get("method") == "dflash" and not target.v1_runner:
        _log.info("torch-dflash: %s is a DSpark drafter, method is dspark", where)
    if spec.get("method") == "dspark" and config.kind != "dspark":
        _fail(f"method must be dflash for {where}, a {config.kind} drafter, got 'dspark'")
    tokens = spec.get("num_speculative_tokens")
    most = config.max_draft_tokens
    if tokens is None:
        tokens = most
    if not isinstance(tokens, int) or isinstance(tokens, bool) or not 1 <= tokens <= most:
        _fail(
            f"num_speculative_tokens must be 1..{most} for {where} (block size "
            f"{config.block_size}), got {tokens!r}"
        )
    _check_heads(drafter, spec, target)
    _check_shards(config, where, target.tensor_parallel_size)
    rope = config.rope
    if rope.type == "yarn":
        longest = int((rope.original_max_position_embeddings or 0) * rope.factor)
        if target.max_model_len > longest:
            _fail(
                f"{where}: the drafter's YaRN rope ends at {longest} positions, got max_model_len "
                f"{target.max_model_len}; pass --max-model-len {longest} or less"
            )
    for note in config.notes:
        _log.warning("torch-dflash: %s: %s", where, note)
    return tokens


def _check_heads(drafter: Drafter, spec: Mapping[str, Any], target: Target) -> None:
    config, where = drafter.config, str(drafter.path)
    if config.markov_head_type not in (None, "vanilla") and not target.v1_runner:
        head = f"{where}: the Markov head must be vanilla"
        if not target.chain_hook:
            _fail(f"{head} on a GPU in this vLLM, got {config.markov_head_type!r}; take vLLM 0.33")
        if "dspark_draft_topk" in drafter.extra:
            _fail(f"{head} beside dspark_draft_topk on a GPU, got {config.markov_head_type!r}")
    if config.kind == "dspark" and drafter.mask_embedding:
        _fail(f"{where}: vLLM reads no mask_embedding.pt for DSpark, got one")
    if config.kind == "dspark" and config.input_embedding_scale != 1:
        _fail(
            f"{where}: input_embedding_scale must be 1 for DSpark in vLLM, got "
            f"{config.input_embedding_scale}"
        )
    if config.kind == "dflash2" and "d2t" in drafter.names:
        _fail(f"{where}: vLLM runs DFlash2 with the whole vocabulary, got a d2t table")
    if config.hidden_size != target.hidden_size and "embed_tokens.weight" not in drafter.names:
        _fail(
            f"{where}: the drafter must bring its own embedding, since its hidden size "
            f"{config.hidden_size} is not the target's {target.hidden_size}"
        )
    if not target.v1_runner:
        return
    sample = spec.get("draft_sample_method", "greedy")
    if config.kind != "dflash" and sample != "greedy":
        _fail(
            f"draft_sample_method must be greedy for {config.kind} on vLLM's V1 runner (CPU), got "
            f"{sample!r}"
        )
    if config.kind != "dflash" and spec.get("use_local_argmax_reduction") is False:
        _fail(
            f"use_local_argmax_reduction must be true for {config.kind} on vLLM's V1 runner (CPU), "
            "got false"
        )
    if len({layer.window for layer in config.layers}) > 1:
        _fail(
            f"{where}: vLLM's V1 runner (CPU) needs the same attention in every layer of a "
            "drafter, got full and sliding ones"
        )
    if len({layer.causal for layer in config.layers}) > 1:
        _fail(
            f"{where}: vLLM's V1 runner (CPU) needs the same causality in every layer of a "
            "drafter, got both"
        )


def _check_shards(config: DrafterConfig, where: str, ranks: int) -> None:
    kv = config.num_kv_heads
    wrong = []
    if config.num_heads % ranks:
        wrong.append(f"{config.num_heads} attention heads")
    if kv % ranks if kv >= ranks else ranks % kv:
        wrong.append(f"{kv} kv heads")
    if config.intermediate_size % ranks:
        wrong.append(f"an FFN of {config.intermediate_size}")
    if wrong:
        _fail(
            f"{where}: tensor_parallel_size must divide the drafter, got {ranks} ranks for "
            f"{' and '.join(wrong)}"
        )


def _fail(text: str) -> NoReturn:
    raise ValueError(f"{WHERE}: {text}")
