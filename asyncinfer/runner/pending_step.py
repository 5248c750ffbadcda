"""`PendingStep`: a launched step. `StepBuffers` receives its tensors on the host, and
`EagerResults` makes the step's result of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from asyncinfer.errors import RequestFailed
from asyncinfer.runner.accelerator import Accelerator
from asyncinfer.runner.slot_state import Staging
from asyncinfer.sampling import PluginCall, Sampled, pack_scores, row_logprobs
from asyncinfer.scheduler import StepResult

__all__ = [
    "BufferPool",
    "EagerResults",
    "PendingStep",
    "PinnedBuffers",
    "StepBuffers",
    "drawn_result",
]

I32 = npt.NDArray[np.int32]

#: Tensors of `score_tokens`.
_SCORES = 5
#: Bytes at which each result begins, so that every dtype is aligned.
_ALIGN = 16


@dataclass(slots=True)
class PendingStep:
    """A launched step, until it is collected."""

    buffers: StepBuffers
    #: Gives the step's result, once `buffers.wait` has returned.
    read: Callable[[], StepResult]

    def result(self) -> StepResult:
        """What the step drew, once `buffers.wait` has returned."""
        result = self.read()
        result.late = self.buffers.late
        return result


@dataclass(slots=True)
class EagerResults:
    """The results of a step that is no graph of a device, and what each of them stands for."""

    #: In this order: drawn tokens; peaks; verdicts on plugins; scores of the draws, if any were
    #: asked for; peaks of `chunks`, if there are any; scores of each of `prompts`; states of
    #: each of `pooled`; predicted tokens, if there are any.
    tensors: list[torch.Tensor] = field(default_factory=list)
    #: Row of the step of each draw.
    draw_rows: list[int] = field(default_factory=list)
    #: Draws that asked for logprobs, with the number of alternatives.
    scored: dict[int, int] = field(default_factory=dict)
    #: Rows with tokens that nothing is drawn from, if these must be checked for NaN.
    chunks: list[int] = field(default_factory=list)
    #: Rows that asked for prompt logprobs, with the number of alternatives.
    prompts: dict[int, int] = field(default_factory=dict)
    #: Rows of which hidden states were asked for.
    pooled: list[int] = field(default_factory=list)
    #: Rows with a draft -> the draft.
    drafts: Mapping[int, Sequence[int]] = field(default_factory=dict)
    #: For each token predicted after draws: the row, and the token's position.
    predicted: Sequence[tuple[int, int]] = ()
    #: What sampler plugins did.
    calls: list[PluginCall] = field(default_factory=list)

    def keep(self, sampled: Sampled) -> list[torch.Tensor]:
        """Note what was drawn. Gives those of its tensors that the host has to see."""
        self.scored, self.calls = sampled.scored_rows, sampled.calls
        verdicts = [call.verdict for call in sampled.calls if call.verdict is not None]
        return [sampled.tokens, sampled.peak, *verdicts, *sampled.scores]

    def read(self) -> StepResult:
        """The step's result. Its tensors have arrived."""
        tokens, peaks, *scores = self.tensors
        further = scores.pop().tolist() if self.predicted else []
        wrong: dict[int, Exception] = {
            draw: _failure(peaks[draw].item())
            for draw in np.flatnonzero(~np.isfinite(peaks.numpy())).tolist()
        }
        for call in self.calls:
            verdict = None if call.verdict is None else scores.pop(0)
            for draw, error in call.failures(verdict).items():
                wrong.setdefault(draw, error)
        failed, spoilt = self._failures(wrong)
        if self.chunks:
            # Other requests will find these tokens' blocks, though nothing was drawn from them.
            chunks = scores.pop(_SCORES if self.scored else 0)
            for i in (~chunks.isfinite()).nonzero()[:, 0].tolist():
                what = f"the model's hidden states are not finite ({chunks[i].item()})"
                failed.setdefault(self.chunks[i], RequestFailed(what))
        # Copies: later steps have the buffers.
        states = [scores.pop().numpy().copy() for _ in self.pooled]
        pooled = dict(zip(reversed(self.pooled), states, strict=True))
        parts = [
            pack_scores([part.numpy() for part in scores[i : i + _SCORES]])
            for i in range(0, len(scores), _SCORES)
        ]
        logprobs = {}
        if self.scored:
            drawn = parts.pop(0)
            for row, start, stop, top in self._scored_rows():
                if row not in failed:
                    logprobs[row] = row_logprobs(drawn, start, stop, top)
        prompt_logprobs = {
            row: row_logprobs(part, 0, len(part), top)
            for (row, top), part in zip(self.prompts.items(), parts, strict=True)
        }
        return StepResult(
            tokens.tolist(),
            logprobs,
            prompt_logprobs,
            failed=failed,
            spoilt=spoilt,
            pooled=pooled,
            predicted=_chains(self.predicted, further),
        )

    def _failures(
        self, wrong: Mapping[int, Exception]
    ) -> tuple[dict[int, Exception], dict[int, int]]:
        """From draws that failed to rows that did, and to rows of which some draws can be used."""
        failed: dict[int, Exception] = {}
        spoilt: dict[int, int] = {}
        for draw in sorted(wrong):
            row = self.draw_rows[draw]
            usable = draw - self.draw_rows.index(row) if row in self.drafts else 0
            if usable and row not in failed:
                spoilt.setdefault(row, usable)
            elif not usable:
                failed[row] = wrong[draw]
        return failed, spoilt

    def _scored_rows(self) -> Iterator[tuple[int, int, int, int]]:
        """Each row that asked for logprobs, the range of its scored draws, and how many
        alternatives it wants."""
        rows = [(self.draw_rows[draw], top) for draw, top in self.scored.items()]
        start = 0
        for stop in range(1, len(rows) + 1):
            if stop == len(rows) or rows[stop][0] != rows[start][0]:
                yield rows[start][0], start, stop, rows[start][1]
                start = stop


def _chains(
    places: Sequence[tuple[int, int]], tokens: Sequence[int]
) -> dict[int, tuple[int, list[int]]]:
    """By row: the position of its first predicted token, and the tokens from there on."""
    chains: dict[int, tuple[int, list[int]]] = {}
    for (row, position), token in zip(places, tokens, strict=True):
        chains.setdefault(row, (position, []))[1].append(token)
    return chains


def drawn_result(tokens: list[int], peaks: npt.NDArray[np.float32]) -> StepResult:
    """The result of a step whose every row drew one token; peaks are float32 `[rows]`."""
    finite = np.isfinite(peaks)
    if finite.all():
        return StepResult(tokens)
    failed = {row: _failure(float(peaks[row])) for row in np.flatnonzero(~finite).tolist()}
    return StepResult(tokens, failed=failed)


def _failure(peak: float) -> RequestFailed:
    if peak == -float("inf"):
        return RequestFailed("no token can be drawn: every one is barred")
    return RequestFailed(f"the model's logits are not finite ({peak})")


class StepBuffers:
    """Host memory that one step in flight owns until it is collected.

    This class serves a CPU, where results lie on the host already, and a draft model, which waits
    for each of its steps. `PinnedBuffers` serves a GPU."""

    def __init__(self) -> None:
        #: Pinned memory for the changes that the step sends to the device.
        self.staging = Staging()
        #: See `StepResult`.
        self.late = False

    def fetch(self, results: torch.Tensor) -> I32:
        """Start the copy of int32 `results`. Returns host memory that is valid after `wait`."""
        return results.numpy()

    def fetch_all(self, results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Start the copies of tensors of any dtype. Returns host tensors that are valid from `wait`
        to the next use of these buffers."""
        return [tensor if tensor.is_cpu else tensor.cpu() for tensor in results]

    def arrived(self) -> bool:
        """Whether the copies have arrived, after all other work of the step. On a CPU they are
        there from the start, so that nothing was late: this says no."""
        return False

    def wait(self) -> None:
        """Return when the copies have arrived, after all other work of the step."""


class PinnedBuffers(StepBuffers):
    """Results are copied to pinned memory, on a stream beside the steps."""

    def __init__(self, accelerator: Accelerator) -> None:
        super().__init__()
        self._accelerator = accelerator
        self._computed, self._arrived = accelerator.event(), accelerator.event()
        self._pinned = accelerator.pinned(0)
        #: Where results of replayed steps arrive, by shape: a tensor, and its memory in numpy.
        self._landings: dict[torch.Size, tuple[torch.Tensor, I32]] = {}
        #: The device's tensors, kept until they are copied, since torch would reuse their memory.
        self.sources: list[torch.Tensor] = []

    def fetch(self, results: torch.Tensor) -> I32:
        landing = self._landings.get(results.shape)
        if landing is None:
            memory = self._accelerator.pinned(results.numel() * 4)
            host = memory.view(torch.int32).view(results.shape)
            landing = self._landings[results.shape] = host, host.numpy()
        self.start([results], [landing[0]])
        return landing[1]

    def fetch_all(self, results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        sizes = [-(-tensor.nbytes // _ALIGN) * _ALIGN for tensor in results]
        if sum(sizes) > self._pinned.numel():
            self._pinned = self._accelerator.pinned(max(4096, 2 * sum(sizes)))
        hosts, start = [], 0
        for tensor, size in zip(results, sizes, strict=True):
            memory = self._pinned[start : start + tensor.nbytes]
            hosts.append(memory.view(tensor.dtype).view(tensor.shape))
            start += size
        self.start(results, hosts)
        return hosts

    def arrived(self) -> bool:
        return self._arrived.query()

    def wait(self) -> None:
        # Waiting hands over the GIL, and another thread may keep it for milliseconds.
        if not self._arrived.query():
            self._arrived.synchronize()
        self.sources.clear()

    def start(self, results: Sequence[torch.Tensor], hosts: Sequence[torch.Tensor]) -> None:
        """Copy `results` to `hosts` once the work launched so far is done, while later steps
        run."""
        side = self._accelerator.side
        self._computed.record(self._accelerator.main)
        self._computed.wait(side)
        self.sources += results
        with self._accelerator.on_side():
            for result, host in zip(results, hosts, strict=True):
                host.copy_(result, non_blocking=True)
        self._arrived.record(side)


class BufferPool:
    """Hands the buffers of collected steps to later steps.

    Args:
        accelerator: None on a CPU.
    """

    def __init__(self, accelerator: Accelerator | None) -> None:
        self._accelerator = accelerator
        self._free: list[StepBuffers] = []
        #: Those of the step that was launched last, until it is collected.
        self._last: StepBuffers | None = None

    def take(self) -> StepBuffers:
        """For a step that is launched now."""
        late = self._last is not None and self._last.arrived()
        if self._free:
            self._last = self._free.pop()
        elif self._accelerator is None:
            self._last = StepBuffers()
        else:
            self._last = PinnedBuffers(self._accelerator)
        self._last.late = late
        return self._last

    def give_back(self, buffers: StepBuffers) -> None:
        """Take back the buffers of a collected step whose results were read."""
        self._free.append(buffers)
        if buffers is self._last:
            self._last = None

    def lost(self) -> None:
        """The step that took buffers last was not launched; it is not known what they hold."""
        self._last = None
