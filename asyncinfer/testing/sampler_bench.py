"""`SamplerBench`: the engine's own sampling, without an engine or a model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from asyncinfer.params import SamplingParams
from asyncinfer.protocols import SamplerPlugin
from asyncinfer.sampling import Sampled, SamplingState, TokenHistory
from asyncinfer.scheduler import ChosenSampler, Join

__all__ = ["SamplerBench"]


class SamplerBench:
    """Slots, their tokens, and the chain with its plugins; logits come from the caller.

    Args:
        vocab_size: tokens there are.
        slots: requests at once.
        device: where everything lives.
        timeout: as `EngineConfig.sampler_timeout`; by default there is none.
    """

    def __init__(
        self,
        vocab_size: int,
        slots: int = 8,
        *,
        device: str | torch.device = "cpu",
        timeout: float = math.inf,
    ) -> None:
        self.device = torch.device(device)
        self._history = TokenHistory(slots, self.device)
        self._state = SamplingState(slots, vocab_size, self._history, sampler_timeout=timeout)
        self._chosen: dict[int, tuple[ChosenSampler, ...]] = {}
        self._tokens: dict[int, tuple[list[int], int]] = {}
        self._params: dict[int, tuple[SamplingParams, int]] = {}

    @torch.inference_mode()
    def join(
        self,
        slot: int,
        sampler: SamplerPlugin | Sequence[SamplerPlugin] | None,
        *,
        tokens: Sequence[int] = (0,),
        prompt_len: int | None = None,
        seed: int = 0,
        **options: Any,
    ) -> None:
        """A request enters: `tokens` so far, of which `prompt_len` (all of them by default) are
        the prompt; `options` are those of `SamplingParams`. Several samplers are called in their
        order."""
        several = (
            sampler if isinstance(sampler, Sequence) else () if sampler is None else (sampler,)
        )
        chosen = tuple(ChosenSampler(each, _label(each)) for each in several)
        known = list(tokens)
        count = len(known) if prompt_len is None else prompt_len
        self._enter(slot, known, count, SamplingParams(**options), seed, chosen)

    @torch.inference_mode()
    def leave(self, slot: int) -> None:
        """End the request in a slot."""
        self._state.leave(slot)
        self._chosen.pop(slot, None)

    @torch.inference_mode()
    def move(self, slot: int, other: int) -> None:
        """Preempt the request in `slot`, and let it go on in `other`."""
        tokens, prompt_len = self._tokens[slot]
        params, seed = self._params[slot]
        chosen = self._chosen.pop(slot)
        self._state.leave(slot)
        self._enter(other, tokens, prompt_len, params, seed, chosen)

    def tokens(self, slot: int) -> list[int]:
        """The tokens of a slot: prompt and answer."""
        return list(self._tokens[slot][0])

    @torch.inference_mode()
    def draw(self, logits: npt.ArrayLike, slots: Sequence[int]) -> list[int]:
        """One token per row of `logits` `[n, vocab_size]`, appended to its slot's tokens. Raises
        `RequestFailed` if the plugin failed a row."""
        where = np.asarray(slots, np.int64)
        positions = np.array([len(self._tokens[slot][0]) for slot in slots])
        sampled = self.sample(logits, where, positions)
        for call in sampled.calls:
            for error in call.failures(call.verdict).values():
                raise error
        self._history.write(where, positions, sampled.tokens)
        drawn: list[int] = sampled.tokens.tolist()
        for slot, token in zip(slots, drawn, strict=True):
            self._tokens[slot][0].append(token)
        return drawn

    def sample(
        self,
        logits: npt.ArrayLike,
        slots: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
    ) -> Sampled:
        """Sample as the engine's step does: nothing is checked, and nothing appended."""
        values = torch.tensor(np.asarray(logits, np.float32), device=self.device)
        return self.step(values, slots, positions)

    @torch.inference_mode()
    def step(
        self,
        logits: torch.Tensor,
        slots: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
    ) -> Sampled:
        """`sample` of float32 logits on the device, which are changed."""
        return self._state.sample(logits, slots, positions)

    def _enter(
        self,
        slot: int,
        tokens: list[int],
        prompt_len: int,
        params: SamplingParams,
        seed: int,
        chosen: tuple[ChosenSampler, ...],
    ) -> None:
        self._history.join(slot, tokens)
        self._state.join(
            slot, Join(slot, list(tokens), prompt_len, [], params, seed, samplers=chosen)
        )
        self._chosen[slot] = chosen
        self._tokens[slot] = (tokens, prompt_len)
        self._params[slot] = (params, seed)


def _label(sampler: SamplerPlugin) -> str:
    # A plugin that the kit wraps has the name of what is in it.
    return f"sampler {type(getattr(sampler, 'plugin', sampler)).__name__}"
