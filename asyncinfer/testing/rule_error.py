"""`RuleError`, what the conformance kits raise; and `WatchedCalls`, the rules that hold for each
call of a policy, whatever its kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import FrozenInstanceError
from time import perf_counter
from typing import Any

from asyncinfer.plugins.supervision import interrupted, recorded

__all__ = ["RuleError", "WatchedCalls"]


class RuleError(AssertionError):
    """A plugin breaks a rule of its protocol. The message begins with the rule's name and shows
    the smallest case found."""

    def __init__(self, rule: str, what: str) -> None:
        super().__init__(f"{rule}: {what}")
        self.rule = rule
        self.what = what


class WatchedCalls:
    """Calls the methods of `policy`, which messages of the engine call a `kind`. `most` late calls
    of one method in a row break the rule: a busy machine slows fewer."""

    def __init__(self, policy: object, kind: str, most: int) -> None:
        self._policy = policy
        self._label = f"{kind} {type(policy).__qualname__}"
        self._most = most
        self._late_in_a_row: dict[str, int] = {}

    def call(self, method: str, what: Callable[[], str], *arguments: Any, allowed: float) -> Any:
        """The method's answer. Raises `RuleError` where it raises, and where it took longer than
        the `allowed` seconds too often; the message has `what()` for the call."""
        began = perf_counter()
        try:
            with recorded(self._label, method):
                answer = getattr(self._policy, method)(*arguments)
        except FrozenInstanceError as error:
            raise RuleError("read only", f"{what()} raised {error!r}") from error
        except BaseException as error:
            if interrupted(error):
                raise
            raise RuleError("never raises", f"{what()} raised {error!r}") from error
        spent = perf_counter() - began
        before = self._late_in_a_row.get(method, 0)
        late = self._late_in_a_row[method] = before + 1 if spent > allowed else 0
        if late == self._most:
            raise RuleError(
                "time",
                f"{what()} took {spent * 1e3:.3g} ms, as {late} calls in a row took too long; the "
                f"engine, which allows {allowed * 1e3:g} ms, would replace the policy",
            )
        return answer
