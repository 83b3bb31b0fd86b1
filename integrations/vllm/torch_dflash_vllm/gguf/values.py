"""Values that a GGUF file holds in another form than vLLM's parameters."""

import torch
from torch import Tensor

__all__ = ["log_decay"]


def log_decay(A: Tensor) -> Tensor:
    """``A_log`` with ``-exp(A_log)`` as close to ``A`` as float32 allows.

    The nearest value of bfloat16 is taken where it gives ``A`` exactly: it is what the model was
    trained with. Else, of the logarithm and its neighbours, the one that comes closest.

    Args:
        A: float32, negative.

    >>> a_log = torch.tensor([0.5, 1.75, -3.0])
    >>> torch.equal(log_decay(-a_log.exp()), a_log)
    True
    """
    exact = (-A.double()).log()
    near = exact.float()
    far = torch.full_like(near, torch.inf)
    steps = [torch.nextafter(near, end) for end in (far, -far)]
    choices = torch.stack([exact.bfloat16().float(), near, *steps])
    error = (choices.exp() + A).abs()
    return choices.gather(0, error.argmin(0, keepdim=True))[0]
