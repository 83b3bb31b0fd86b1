"""Feature ``drafters``: GGUF drafters, checks against the target, DFlash2 and DSpark on the CPU."""

import functools
import inspect
import logging
from typing import Any

from .adaptive import switch_on
from .drafter_plan import ALIASES, Target, plan
from .features import Declined

__all__ = ["apply"]

_log = logging.getLogger("vllm.torch_dflash")
_MODELS = "torch_dflash_vllm.draft_models"


def apply() -> str:
    """Wrap the place where vLLM makes its speculative config; register architectures."""
    from vllm import ModelRegistry
    from vllm.engine.arg_utils import EngineArgs

    wanted = ["self", "target_model_config", "target_parallel_config"]
    found = [*inspect.signature(EngineArgs.create_speculative_config).parameters]
    if found != wanted:
        raise Declined(f"create_speculative_config must take {wanted}, takes {found}")
    _wrap(EngineArgs)
    names = {
        "DFlashDraftModel": "DFlash",
        "DFlash2DraftModel": "DFlash2",
        "Qwen3DSparkModel": "DSpark",
        ALIASES["dflash2"]: "DFlash2",
        ALIASES["dspark"]: "DSpark",
    }
    for architecture, name in names.items():
        ModelRegistry.register_model(architecture, f"{_MODELS}:{name}")
    detail = "GGUF and folders, checked against the target"
    if uses_v1_runner():
        _bind_proposer()
        return f"{detail}; DFlash2 and DSpark on the V1 runner"
    return detail


def uses_v1_runner() -> bool:
    """Whether vLLM will take its V1 model runner: told to, or without Triton."""
    import vllm.envs as envs
    from vllm.triton_utils import HAS_TRITON

    asked = envs.VLLM_USE_V2_MODEL_RUNNER
    return not HAS_TRITON if asked is None else not asked


def _has_chain_hook() -> bool:
    """Whether DSpark's loop of the V2 runner asks the model first."""
    from vllm.version import __version_tuple__

    return tuple(__version_tuple__[:2]) >= (0, 33)


def _bind_proposer() -> None:
    import vllm.v1.worker.gpu_model_runner as runner

    from .draft_proposer import BlockProposer

    runner.DFlashProposer = BlockProposer


def _wrap(engine_args: Any) -> None:
    from vllm.platforms import current_platform

    original = engine_args.create_speculative_config
    if hasattr(original, "torch_dflash"):
        return

    @functools.wraps(original)
    def create(self: Any, target_model_config: Any, target_parallel_config: Any) -> Any:
        spec = _merged(self)
        if spec is not None:
            target = _target(self, target_model_config, target_parallel_config)
            planned = plan(spec, target)
            if planned is not None:
                planned |= switch_on(
                    self,
                    planned,
                    hybrid=bool(target_model_config.is_hybrid),
                    cpu=current_platform.is_cpu(),
                    graphs=not target.v1_runner,
                )
                self.speculative_config = planned
                self.spec_method = self.spec_model = self.spec_tokens = None
        return original(self, target_model_config, target_parallel_config)

    create.torch_dflash = True  # type: ignore[attr-defined]
    engine_args.create_speculative_config = create


def _merged(args: Any) -> dict[str, Any] | None:
    """``--speculative-config`` with the short flags; None where vLLM has to complain itself."""
    short = {
        "method": args.spec_method,
        "model": args.spec_model,
        "num_speculative_tokens": args.spec_tokens,
    }
    given = {key: value for key, value in short.items() if value is not None}
    if args.speculative_config is None and not given:
        return None
    spec = {k.replace("-", "_"): v for k, v in (args.speculative_config or {}).items()}
    return None if spec.keys() & given.keys() else spec | given


def _target(args: Any, model: Any, parallel: Any) -> Target:
    return Target(
        hidden_size=model.get_hidden_size(),
        vocab_size=model.get_vocab_size(),
        num_layers=model.get_total_num_hidden_layers(),
        max_model_len=model.max_model_len,
        dtype=model.dtype,
        tensor_parallel_size=parallel.tensor_parallel_size,
        v1_runner=uses_v1_runner(),
        chain_hook=_has_chain_hook(),
        load_format=str(args.load_format),
    )
