"""Policies: how much of a proposal is worth verifying. None of them can change a token."""

from .base import Policy
from .confidence import ConfidencePolicy
from .cost import CostPolicy
from .fixed import FixedPolicy

__all__ = ["ConfidencePolicy", "CostPolicy", "FixedPolicy", "Policy"]
