"""`GuardedProposer`: one proposer, timed and checked at every call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from operator import index
from typing import Any, Final

from asyncinfer.plugins.supervision import Limits, PluginFault, Supervisor
from asyncinfer.protocols import DraftRequest, Proposer

__all__ = ["GuardedProposer"]

#: Strict, since a step and all of its requests wait for the call.
LIMITS: Final = Limits(seconds=0.001, debt=1.0, raised=3)


class GuardedProposer:
    """Asks a plugin. Whatever it does, the answer is a list of tokens for each request.

    Args:
        name: of the method, in statistics.
        label: the plugin's name for messages.
        vocab_size: token ids that are not below it are a fault.
        report: told of the first fault of each kind.
        clock: monotonic seconds; None: no call is too slow.
    """

    def __init__(
        self,
        proposer: Proposer,
        name: str,
        label: str,
        *,
        vocab_size: int,
        report: Callable[[Exception], object] | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.name: Final = name
        self._proposer = proposer
        self._vocab_size = vocab_size
        self._supervisor = Supervisor(
            label,
            LIMITS,
            consequence="it is not asked any more, and requests go on without its drafts",
            report=report,
            clock=clock,
        )

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Sequence[int]]:
        """A draft for each request; empty ones where the plugin fails."""
        drafts: Sequence[Sequence[int]] = ()
        if self._supervisor.retired is None:
            wanted = [request.most for request in requests]

            def check(answer: Any) -> list[list[int]]:
                return self._checked(answer, wanted)

            with suppress(PluginFault):
                drafts = self._supervisor.call(self._proposer, "propose", requests, check=check)
        return drafts or [()] * len(requests)

    def end(self, request: DraftRequest) -> None:
        """Tell the plugin that an answer has ended."""
        if self._supervisor.retired is None:
            with suppress(PluginFault):
                self._supervisor.call(self._proposer, "end", request)
        request.state = None

    def _checked(self, answer: Any, wanted: Sequence[int]) -> list[list[int]]:
        if len(answer) != len(wanted):
            raise ValueError(f"{len(answer)} drafts for {len(wanted)} requests")
        pairs = zip(answer, wanted, strict=True)
        drafts = [[index(token) for token in draft[:most]] for draft, most in pairs]
        for draft in drafts:
            for token in draft:
                if not 0 <= token < self._vocab_size:
                    raise ValueError(f"token {token} is not in 0 .. {self._vocab_size - 1}")
        return drafts
