"""DSpark's gated and recurrent Markov heads, which vLLM does not have, in its V2 runner's loop."""

from typing import Any, Final

import torch
from torch import Tensor, nn

__all__ = ["JointHead", "draft"]

# markov_head_type -> ops.markov_chain's head_type, and the module's name in checkpoints
HEADS: Final = {"gated": (1, "gate_proj"), "rnn": (2, "joint_proj")}


class JointHead(nn.Linear):
    """The matrix J in front of ``w2``: what its row of the Markov table becomes beside the hidden.

    The formulas are those of :func:`torch_dflash.ops.markov_chain`.

    Attributes:
        name: of the module in checkpoints, in ``markov_head``.
        recurrent: whether the head has a memory.
    """

    def __init__(self, kind: str, rank: int, hidden: int) -> None:
        inputs, outputs = (
            (hidden + rank, rank) if kind == "gated" else (2 * rank + hidden, 3 * rank)
        )
        super().__init__(inputs, outputs)
        nn.init.zeros_(self.bias)  # a checkpoint may have none
        self.name, self.recurrent = HEADS[kind][1], kind == "rnn"
        self.requires_grad_(False)

    def step(self, embed: Tensor, hidden: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """One slot of every block.

        Args:
            embed: row of the table for the token before ``[blocks, rank]``.
            hidden: of the slot ``[blocks, hidden]``.
            memory: of a recurrent head ``[blocks, rank]``, zeros at the first slot.

        Returns:
            what ``w2`` multiplies, and the memory for the next slot; both ``[blocks, rank]``.
        """
        if not self.recurrent:
            gate = self(torch.cat([hidden, embed], dim=-1))
            return gate.sigmoid() * embed, memory
        gate, candidate, out = self(torch.cat([memory, embed, hidden], dim=-1)).chunk(3, dim=-1)
        keep = gate.sigmoid()
        return out.tanh(), keep * memory + (1 - keep) * candidate.tanh()


def draft(model: Any, joint: JointHead, speculator: Any, num_reqs: int, rows: Tensor) -> None:
    """What vLLM's own loop does with a vanilla head: sampled, scored or greedy drafts.

    Args:
        model: the drafter.
        joint: its head's matrix.
        speculator: vLLM's ``DSparkSpeculator``; its drafts and confidences are filled in.
        num_reqs: blocks.
        rows: hidden rows of the pass.
    """
    drafts = speculator.num_speculative_steps
    count = num_reqs * drafts
    hidden = rows[speculator.sample_indices[:count]]
    logits = model.compute_draft_logits(hidden).view(num_reqs, drafts, -1)
    requests = speculator.sample_idx_mapping[:count].view(num_reqs, drafts)
    positions = speculator.sample_pos[:count].view(num_reqs, drafts)
    blocks = hidden.view(num_reqs, drafts, -1)
    token = speculator.input_buffers.input_ids[speculator._anchor_idx[:num_reqs]]
    embeds = []
    memory = None
    for i in range(drafts):
        embed = model.markov_embed(token)
        embeds.append(embed)
        memory = torch.zeros_like(embed) if memory is None else memory
        row, memory = joint.step(embed, blocks[:, i], memory)
        scored = logits[:, i] + model.markov_bias(row)
        token = speculator._sample_logits(scored, requests[:, i], positions[:, i], i)
        speculator.draft_tokens[:num_reqs, i] = token
    if speculator.use_confidence_head:
        confidence = model.compute_confidence(hidden, torch.stack(embeds, dim=1).flatten(0, 1))
        speculator.draft_token_confidence_probs[:num_reqs] = confidence.view(num_reqs, drafts)
