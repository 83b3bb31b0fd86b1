"""What ``torch-dflash vllm-check`` shows: what the plugin does to the vLLM that is installed."""

import importlib.metadata
import os
from collections.abc import Mapping
from typing import Any, Final

from .features import FEATURES, outcomes, register

__all__ = ["PLUGIN", "loaded", "report"]

PLUGIN: Final = "torch_dflash"  # of the entry point, as VLLM_PLUGINS names it
_GROUP: Final = "vllm.general_plugins"


def loaded(environment: Mapping[str, str], plugins: list[str]) -> str:
    """Whether vLLM loads the plugin by itself: ``yes``, or why not and what to do.

    Args:
        environment: variables.
        plugins: entry points of vLLM's group.
    """
    if PLUGIN not in plugins:
        return f"no: the entry point {PLUGIN} is missing; install torch-dflash with pip"
    allowed = environment.get("VLLM_PLUGINS")
    if allowed is not None and PLUGIN not in [n.strip() for n in allowed.split(",")]:
        return f"no: VLLM_PLUGINS is {allowed!r}; add {PLUGIN} to it"
    return "yes"


def report() -> dict[str, Any]:
    """Facts about vLLM and the plugin in this environment, as plain values."""
    import torch
    from vllm.platforms import current_platform
    from vllm.version import __version__

    import torch_dflash

    from .drafters import uses_v1_runner

    # the table says it all; the log line is for engines
    os.environ.setdefault("TORCH_DFLASH_REPORTED", __version__)
    register()
    plugins = sorted(e.name for e in importlib.metadata.entry_points(group=_GROUP))
    checked = sorted({v for f in FEATURES for v in f.checked})
    backend = "CUDA" if current_platform.is_cuda_alike() else "CPU"
    has = torch._C._dispatch_has_kernel_for_dispatch_key("dflash::gdn_step", backend)
    return {
        "vLLM": f"{__version__} (checked: {', '.join(checked)})",
        "torch-dflash": torch_dflash.__version__,
        "loaded by vLLM": loaded(os.environ, plugins),
        "other plugins": ", ".join(p for p in plugins if p != PLUGIN) or "none",
        "device": f"{current_platform.device_name}, kernels {'built' if has else 'not built'}",
        "model runner": "V1" if uses_v1_runner() else "V2",
        "features": {
            name: {"state": o.state, "detail": o.detail} for name, o in outcomes().items()
        },
    }
