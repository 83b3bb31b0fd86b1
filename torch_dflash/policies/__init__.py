"""Policies: how much of a proposal is worth verifying. None of them can change a token."""

from .base import Policy
from .cost import CostPolicy
from .fixed import FixedPolicy

__all__ = ["CostPolicy", "FixedPolicy", "Policy"]
