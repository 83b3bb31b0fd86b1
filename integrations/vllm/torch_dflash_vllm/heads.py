"""Feature ``heads``: on a GPU too, drafters choose their tokens through torch.ops.dflash."""

from .features import Declined, outcomes

__all__ = ["apply"]


def apply() -> str:
    """Only a switch: the drafters' classes look at it when they are built."""
    drafters = outcomes().get("drafters")
    if drafters is None or drafters.state != "on":
        raise Declined("feature drafters must be on, it is not")
    return "head_topk for DFlash2's candidates, markov_chain for DSpark's greedy drafts"
