"""`RuleError`: what the conformance kits raise."""

from __future__ import annotations

__all__ = ["RuleError"]


class RuleError(AssertionError):
    """A plugin breaks a rule of its protocol. The message begins with the rule's name and shows
    the smallest case found."""

    def __init__(self, rule: str, what: str) -> None:
        super().__init__(f"{rule}: {what}")
        self.rule = rule
        self.what = what
