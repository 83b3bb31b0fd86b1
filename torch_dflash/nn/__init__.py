"""Modules over the operators: what targets and drafters are made of."""

from .linear import ACT_FLOAT, ACT_PLANES, ACT_Q8_1, QuantGLU, QuantLinear
from .module import Module
from .norm import RMSNorm
from .vocabulary import QuantEmbedding, Vocabulary

__all__ = [
    "ACT_FLOAT",
    "ACT_PLANES",
    "ACT_Q8_1",
    "Module",
    "QuantEmbedding",
    "QuantGLU",
    "QuantLinear",
    "RMSNorm",
    "Vocabulary",
]
