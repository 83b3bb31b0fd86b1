"""The models whose shapes are measured."""

from dataclasses import dataclass
from typing import Any, Final

from torch_dflash.drafters.config import DrafterConfig
from torch_dflash.drafters.from_hf import config_from_hf
from torch_dflash.drafters.rope import RopeConfig
from torch_dflash.models.config import Qwen35Config
from torch_dflash.testing.published import DFLASH2_27B

from .timing import COLD_BYTES

__all__ = ["QWEN_27B", "TINY", "Shapes"]


@dataclass(frozen=True)
class Shapes:
    """A hybrid target and a DFlash2 drafter for it.

    Attributes:
        name: for the file.
        target, drafter: sizes.
        context: committed tokens before a step.
        contexts: of the attention operator alone.
        cold_bytes: what must lie between two uses of a weight, so that no cache holds it.
        stream_bytes: of the buffers that the roofline reads and copies.
    """

    name: str
    target: Qwen35Config
    drafter: DrafterConfig
    context: int
    contexts: tuple[int, ...]
    cold_bytes: int
    stream_bytes: int

    @property
    def matmuls(self) -> dict[str, tuple[int, int]]:
        """Rows and columns of the matmuls that are measured one by one."""
        t = self.target
        return {
            "gate+up": (2 * t.intermediate_size, t.hidden_size),
            "down": (t.hidden_size, t.intermediate_size),
            "qkv": (t.conv_channels, t.hidden_size),
        }


def _target(**sizes: Any) -> Qwen35Config:
    layers, interval = sizes.pop("num_layers"), sizes.pop("interval")
    return Qwen35Config(
        arch="qwen35",
        num_layers=layers,
        rope=RopeConfig(theta=1e7, rotary_dim=64),
        rms_norm_eps=1e-6,
        context_length=262144,
        tied=False,
        layer_kinds=tuple("full" if (i + 1) % interval == 0 else "gdn" for i in range(layers)),
        num_nextn_layers=0,
        rope_sections=(11, 11, 10, 0),
        conv_kernel=4,
        **sizes,
    )


QWEN_27B: Final = Shapes(
    name="Qwen3.8-27B",
    target=_target(
        hidden_size=5120,
        intermediate_size=17408,
        num_layers=64,
        interval=4,
        num_heads=24,
        num_kv_heads=4,
        head_dim=256,
        vocab_size=248320,
        num_key_heads=16,
        key_head_dim=128,
        num_value_heads=48,
        value_head_dim=128,
    ),
    drafter=config_from_hf(DFLASH2_27B),
    context=1024,
    contexts=(1024, 8192, 32768),
    cold_bytes=COLD_BYTES,
    stream_bytes=2 << 30,
)

# Small enough for a CPU in a test; every operator sees the same kinds of shapes.
TINY: Final = Shapes(
    name="tiny",
    target=_target(
        hidden_size=256,
        intermediate_size=512,
        num_layers=4,
        interval=2,
        num_heads=4,
        num_kv_heads=1,
        head_dim=64,
        vocab_size=512,
        num_key_heads=2,
        key_head_dim=64,
        num_value_heads=4,
        value_head_dim=64,
    ),
    drafter=config_from_hf(
        {
            **DFLASH2_27B,
            "hidden_size": 256,
            "intermediate_size": 512,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 64,
            "vocab_size": 512,
            "num_target_layers": 4,
            "layer_types": ["sliding_attention"],
            "dflash_config": {
                **DFLASH2_27B["dflash_config"],
                "mask_token_id": 511,
                "target_layer_ids": [0, 2],
                "selector_rank": 32,
            },
        }
    ),
    context=64,
    contexts=(64,),
    cold_bytes=1 << 20,
    stream_bytes=1 << 20,
)
