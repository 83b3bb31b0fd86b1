"""vLLM's V1 proposer of DFlash drafts, with blocks as DFlash2 and DSpark need them."""

from typing import Any

import torch
from torch import Tensor
from vllm.v1.spec_decode.dflash import DFlashProposer

from .draft_models import Block

__all__ = ["BlockProposer"]


class BlockProposer(DFlashProposer):
    """Runs the blocks that the drafter was trained for, and tells it how long they are.

    * Where the scheduler wants fewer tokens than a block has, vLLM would run a shorter block. Its
      rows see each other, so they would predict worse: the whole block is run and cut.
    * DSpark may sample from the anchor's row: then a block of n rows has n draft tokens, where vLLM
      would run one row more.
    """

    num_speculative_tokens: int
    _last_draft_probs: Tensor | None

    def propose(self, num_speculative_tokens: int, *args: Any, **kwargs: Any) -> Tensor:
        """Draft tokens ``[sequences, num_speculative_tokens]``."""
        whole = self.speculative_config.num_speculative_tokens
        wanted = num_speculative_tokens
        tokens = super().propose(whole if wanted else 0, *args, **kwargs)
        if self._last_draft_probs is not None:
            self._last_draft_probs = self._last_draft_probs[:, :wanted].contiguous()
        return tokens[:, :wanted]

    def set_inputs_first_pass(self, *args: Any, **kwargs: Any) -> tuple[int, Tensor, Any]:
        """Inputs of the drafter's pass; ``num_speculative_tokens`` is that of this step."""
        block: Block | None = getattr(self.model, "block", None)
        drafts = self.num_speculative_tokens
        from_anchor = getattr(self.model, "sample_from_anchor", False) and drafts > 0
        if from_anchor:
            self.num_speculative_tokens = drafts - 1
        try:
            rows, sampled, metadata = super().set_inputs_first_pass(*args, **kwargs)
        finally:
            self.num_speculative_tokens = drafts
        if from_anchor:
            sampled = torch.arange(rows, dtype=torch.int32, device=sampled.device)
        if block is not None:
            block.rows = drafts if from_anchor else 1 + drafts
        return rows, sampled, metadata
