"""What a sampler plugin implements: its parameters, and the object that samples by them.

A request names a plugin by its parameters: `sampler=Mirostat(tau=5.0)`, or from JSON
`sampler="mirostat", sampler_args={"tau": 5.0}`. They are a frozen dataclass that knows how to
`open` its `Sampler`. An engine opens one sampler per plugin, for all of its slots, and hands it
in every step the rows that asked for it, as one tensor.

A request may name several, `sampler=["dry", XTC()]`: each gets the logits as the one before left
them, and only the last may draw. Rows that ask for the same samplers in the same order come as
one tensor.

Order of calls, for each slot::

    (join -> [state restored] -> sample* -> [state saved] -> leave)*

Where it stands in the chain: after logit bias, allowed tokens, bad words, `min_tokens` and the
penalties; before temperature, top-k, top-p, min-p, typical and the draw.

Thread: the engine's decode thread only, in `torch.inference_mode()`. Time: a call of `sample`
that takes longer than `EngineConfig.sampler_timeout` is reported; after three in a row the plugin
is not called again. A call that raises, or answers what it may not, fails its own rows with a
`RequestFailed` that names the plugin, and is reported once; other rows go on.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch

__all__ = ["SAMPLER_PROTOCOL_VERSION", "Sampler", "SamplerPlugin", "SamplerStep"]

SAMPLER_PROTOCOL_VERSION = 1


class SamplerStep(Protocol):
    """The rows of one step that asked for a plugin. Valid during the call of `sample` only: it is a
    `RuntimeError` to ask it for anything later.

    A slot occurs once, unless the plugin declares `commutes_with_speculation`.
    """

    @property
    def logits(self) -> torch.Tensor:
        """float32 `[n, vocab_size]`, n >= 1: change it in place. Each row has a finite maximum;
        tokens that may not be drawn are -inf, and stay so whatever is written there."""

    @property
    def slots(self) -> torch.Tensor:
        """int64 `[n]`: the index of each row into tensors by slot."""

    @property
    def positions(self) -> torch.Tensor:
        """int64 `[n]`: where in its sequence the token to draw will stand (= tokens before it)."""

    @property
    def prompt_lens(self) -> torch.Tensor:
        """int64 `[n]`: how many of these tokens are the prompt."""

    def recent(self, count: int) -> torch.Tensor:
        """The last tokens before the one to draw, prompt included.

        Returns:
            int64 `[n, w]`, w the smaller of `count` and the longest row's tokens; the last
            column is each row's last token, -1 on the left where a row has fewer. A copy.
        """

    def weights(self) -> torch.Tensor:
        """What the built-in chain would draw from: `logits` as they are now, after the request's
        temperature and truncation.

        Returns:
            float32 `[n, vocab_size]`, not normalised: the likeliest token has 1, a token that is
            cut 0; a greedy row has one token only. A copy.
        """

    def draw(self, weights: torch.Tensor) -> torch.Tensor:
        """One token per row, with probability proportional to its weight, by the engine's random
        numbers: equal seeds give equal tokens, whatever else is in the batch.

        Args:
            weights: float32 `[n, vocab_size]`, finite and at least 0, one above 0 in each row.

        Returns:
            int64 `[n]`.
        """

    def uniform(self, stream: int = 0) -> torch.Tensor:
        """float64 `[n]` in (0, 1): a random number per row that depends on its seed, its position,
        `stream` (0 to 2^32 - 1) and the number of samplers that follow this one. Independent of
        `draw` and of other streams."""


@runtime_checkable
class Sampler(Protocol):
    """Samples for up to `slots` sequences at once. A subclass inherits `leave` and `state`."""

    @abstractmethod
    def join(self, slot: int, params: Any) -> None:
        """A request with these parameters enters the slot. Forget whatever the slot held: it starts
        anew for another request, and after a preemption `state` is restored afterwards."""

    def leave(self, slot: int) -> None:
        """The request leaves the slot, for now or for good. The method need not do anything."""
        return None

    def state(self) -> Sequence[torch.Tensor]:
        """Everything that one step leaves for the next, as tensors `[slots, ...]` on the device.
        The engine saves a slot's rows when its request is preempted, and restores them after the
        `join` that brings it back, maybe in another slot. Parameters need not be in it."""
        return ()

    @abstractmethod
    def sample(self, step: SamplerStep) -> torch.Tensor | None:
        """Change `step.logits` in place and return None: the chain goes on and draws. Or return
        the tokens, int64 `[n]` on the same device, none of them barred; `step.draw` does that.

        What a row gets may depend on its own logits, tokens, parameters and state only. Never
        wait for the device (`.item()`, `bool(tensor)`), never loop over rows, and use no random
        numbers but those of `step`.
        """


@runtime_checkable
class SamplerPlugin(Protocol):
    """Parameters of a sampler: a frozen dataclass whose fields JSON can hold, checked in
    `__post_init__` (`check_real` and `check_integer` say what is wrong as engine options do).
    Its docstring's first line describes the plugin."""

    #: Whether the sampler can change a greedy request's answer (temperature 0). If not, it is
    #: refused for such a request, since it would do nothing.
    changes_argmax: ClassVar[bool] = True
    #: Whether `sample` answers with tokens. Then it is the last of a request's samplers.
    draws: ClassVar[bool] = False
    #: Whether `sample` may be recorded in a CUDA graph: the same operations on tensors of the
    #: same shape in every step, no look at values, no `recent`, `draw` or `uniform`. Declared only:
    #: no engine records samplers yet.
    graph_safe: ClassVar[bool] = False
    #: Whether several positions of one slot may be drawn in one step, as when speculated tokens
    #: are verified: true of a sampler without state.
    commutes_with_speculation: ClassVar[bool] = False

    @abstractmethod
    def open(self, slots: int, vocab_size: int, device: torch.device) -> Sampler:
        """A sampler for a whole engine: requests in slots `0 .. slots - 1`, with any parameters
        of this class. Called once per engine, on the parameters of the first request."""
