"""`SamplerRuleError`: what `check_sampler` raises."""

from __future__ import annotations

__all__ = ["SamplerRuleError"]


class SamplerRuleError(AssertionError):
    """A sampler breaks a rule; the message begins with the rule's name and shows the case."""
