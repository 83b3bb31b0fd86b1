"""From files to models: the short way in."""

from pathlib import Path

import torch

from .drafters import Drafter, drafter_for
from .drafters.checkpoint import load_checkpoint
from .jsonfile import CheckpointError
from .models import load_target as _load_target
from .models.build import Activations
from .models.decoder import Decoder
from .models.state import StateKind

__all__ = ["ASSETS", "DRAFTERS", "load_drafter", "load_target"]

ASSETS = Path(__file__).parent / "assets" / "tiny"
DRAFTERS = ("dflash", "dflash2", "dspark")  # of the embedded target


def load_target(
    path: str | Path | None = None,
    *,
    state: StateKind = "journal",
    kv_dtype: torch.dtype = torch.float32,
    state_dtype: torch.dtype = torch.float32,
    activations: Activations = "planes",
) -> Decoder:
    """Load a target from a GGUF file.

    Args:
        path: ``qwen35``, ``qwen3`` or ``llama`` GGUF; None is the embedded model.
        state: how a hybrid's recurrent state is rolled back.
        kv_dtype: dtype of the K and V caches.
        state_dtype: dtype of the GDN states.
        activations: what quantized weights are multiplied with: ``planes``, or ``q8_1``, rounded to
            8 bits as llama.cpp rounds them (:func:`torch_dflash.ops.quant_act`).

    Raises:
        GGUFError, CheckpointError: the file cannot be used; the message names what is wrong.
        ValueError: a dtype, state kind or kind of activations that does not exist.
    """
    file = ASSETS / "target.gguf" if path is None else Path(path)
    return _load_target(
        file, state=state, kv_dtype=kv_dtype, state_dtype=state_dtype, activations=activations
    )


def load_drafter(
    path: str | Path, target: Decoder, *, kv_dtype: torch.dtype = torch.float32
) -> Drafter:
    """Load a drafter for a target.

    Args:
        path: GGUF file, Hugging Face folder, or the name of an embedded drafter: ``dflash``,
            ``dflash2`` or ``dspark``.
        target: the model it was trained for; its embedding and head are shared.
        kv_dtype: dtype of the drafter's K and V caches.

    Raises:
        CheckpointError: there is none of this name, the checkpoint cannot be used, or was made for
            another target.
    """
    file = ASSETS / f"{path}.gguf" if str(path) in DRAFTERS else Path(path)
    if len(file.parts) == 1 and not file.suffix and not file.exists():
        raise CheckpointError(
            f"drafter must be {', '.join(DRAFTERS)} or the path of a folder or .gguf file, "
            f"got {str(path)!r}, where nothing is"
        )
    checkpoint = load_checkpoint(file, target=target)
    return drafter_for(checkpoint.config, checkpoint.tensors, target.vocabulary, kv_dtype)
