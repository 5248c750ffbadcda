"""`PluginCall`: what one sampler plugin made of its rows in one step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from asyncinfer.errors import RequestFailed
from asyncinfer.plugins.supervision import PluginFault
from asyncinfer.sampling.guarded_sampler import GuardedSampler, failure
from asyncinfer.sampling.plugin_step import DrawCheck

__all__ = ["PluginCall", "merge_calls"]


@dataclass(slots=True)
class PluginCall:
    """One call. Rows that ask for several samplers have a call for each, in order, up to the first
    that draws or fails."""

    plugin: GuardedSampler
    #: int64 `[k]`: the call's rows of the step's logits.
    rows: npt.NDArray[np.int64]
    #: The same on the device; None if the call has every row.
    at: torch.Tensor | None
    #: float32 `[k]`: the largest logit of each row before any plugin changed it.
    peak: torch.Tensor
    #: int64 `[k]` in `[0, vocab)`: the tokens that the plugin drew; None if the built-in chain
    #: draws.
    tokens: torch.Tensor | None = None
    #: float32 `[k]`: not finite where the answer cannot be used. None if the whole call failed
    #: (`fault`), or until `merge_calls` has seen what the chain drew.
    verdict: torch.Tensor | None = None
    #: The weights that the plugin drew from, if it called `draw`.
    drawn: DrawCheck | None = None
    fault: PluginFault | None = None

    def failures(self, verdict: torch.Tensor | None) -> dict[int, RequestFailed]:
        """Row -> why it failed. `verdict` is the call's, on the host."""
        if self.fault is not None:
            return {row: failure(self.fault) for row in self.rows.tolist()}
        assert verdict is not None
        failed = {}
        for i in (~verdict.isfinite()).nonzero()[:, 0].tolist():
            what = None if self.drawn is None else self.drawn.fault(i)
            if what is None and self.tokens is not None:
                what = "sample() answered a token that is out of range or barred"
            elif what is None:
                what = f"sample() left logits of which the largest is {verdict[i].item()}"
            fault = self.plugin.fault(f"{what}: row {i} of {len(self.rows)}")
            failed[int(self.rows[i])] = failure(fault)
        return failed


def merge_calls(
    calls: Iterable[PluginCall], tokens: torch.Tensor, peak: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The step's tokens and peaks: the plugins' tokens replace those of the chain, and a row's peak
    is the one from before its plugins. The chain's peak of the logits that a plugin left becomes
    the verdict on the plugin.

    Args:
        tokens, peak: what the chain drew from the logits that the plugins left, one per row.
    """
    for call in calls:
        # Whether another plugin was called with the logits that this one left.
        followed = call.tokens is None and call.verdict is not None
        if call.verdict is None and call.fault is None:
            call.verdict = peak if call.at is None else peak.index_select(0, call.at)
        if call.verdict is not None and call.drawn is not None:
            call.verdict = call.drawn.spoil(call.verdict)
        if followed:
            continue
        if call.at is None:
            return tokens if call.tokens is None else call.tokens, call.peak
        if call.tokens is not None:
            tokens.index_copy_(0, call.at, call.tokens)
        peak.index_copy_(0, call.at, call.peak)
    return tokens, peak
