"""`RecordedSampler`: draws that a graph can record, since their options are on the device."""

from __future__ import annotations

from enum import Enum
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from asyncinfer.kernels import ops
from asyncinfer.kernels.noise import draw_race, key_rows, mix_tokens, seed_bits
from asyncinfer.params import SamplingParams
from asyncinfer.sampling.fused import fuses
from asyncinfer.sampling.options import Uses

__all__ = ["MOST_ENTRIES", "NEVER", "OPTION_WORDS", "Draws", "RecordedSampler", "option_words"]

#: Words of a slot's options: temperature, top-k, top-p, min-p, and the seed's two.
OPTION_WORDS: Final = 6
#: Entries of one intermediate `[rows, vocab]` tensor; a larger batch is drawn in parts.
MOST_ENTRIES: Final = 2**24
#: A score, `(logit - largest) / temperature`, that cannot win a draw: the race's variables differ
#: by a factor of e^26 at most.
NEVER: Final = -80.0

# Plain integers: combining flags takes a microsecond, in every step.
_DRAW: Final = int(Uses.DRAW)
#: Options that a recorded step draws by, unfused and fused.
_RECORDED: Final = int(Uses.DRAW | Uses.TEMPERATURE)
_FUSED: Final = int(Uses.FUSED)


class Draws(Enum):
    """What a recorded step draws."""

    #: Every row takes its most likely token.
    GREEDY = "greedy"
    #: Some rows draw at a temperature, and with filters where the draw is fused.
    TEMPERATURE = "temperature"
    #: Nothing: the step ends with the logits, and the draw is not recorded.
    LOGITS = "logits"

    @classmethod
    def serving(cls, uses: int, *, fused: bool = False) -> Draws:
        """The cheapest kind of draw for a batch that uses these options; `fused` as in
        `RecordedSampler`."""
        if uses & ~(_FUSED if fused else _RECORDED):
            return cls.LOGITS
        return cls.TEMPERATURE if uses & _DRAW else cls.GREEDY


def option_words(params: SamplingParams, seed: int) -> npt.NDArray[np.int32]:
    """int32 `[OPTION_WORDS]`: a request's options as the device keeps them. Greedy is temperature
    0; the seed is `mix_seeds` of the request's."""
    words = np.zeros(OPTION_WORDS, np.int32)
    real = words.view(np.float32)
    words.view(np.uint64)[2] = seed_bits(seed)
    if not params.greedy:
        real[0], words[1] = params.temperature, min(params.top_k, 2**31 - 1)
        real[2], real[3] = params.top_p, params.min_p
    return words


class RecordedSampler:
    """Greedy rows and draws at a temperature, in operators that do not wait for the host. Draws the
    same tokens as `SamplingState`.

    Args:
        fused: as in `SamplingState`; filters are recorded only if it is True.
    """

    def __init__(self, vocab_size: int, device: torch.device, *, fused: bool | None = None) -> None:
        self._vocab_size = vocab_size
        self._mixed = mix_tokens(vocab_size, device)
        self.fused = fuses(self._mixed) if fused is None else fused

    def __call__(
        self,
        logits: torch.Tensor,
        options: torch.Tensor,
        seeds: torch.Tensor,
        positions: torch.Tensor,
        draws: Draws,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens int64 `[n]` and each row's largest logit, float32 `[n]`.

        Args:
            logits: float32 `[n, vocab_size]`, overwritten. If the draw is fused: any floating
                dtype, not changed.
            options: int32 `[OPTION_WORDS - 2, n]`: the rows' words, without those of the seed.
            seeds: int64 `[n]`: the words of the seed.
            positions: integers `[n]`: positions of the tokens to draw.
        """
        temperatures = options.view(torch.float32)[0]
        if self.fused:
            if draws is Draws.GREEDY:
                tokens, peak, _ = ops.sample(logits)
                return tokens, peak
            _, _, top_p, min_p = options.view(torch.float32)
            tokens, peak, _ = ops.sample(
                logits, seeds, positions, temperatures, top_k=options[1], top_p=top_p, min_p=min_p
            )
            return tokens, peak
        peak, best = logits.max(dim=-1)
        if draws is Draws.GREEDY:
            return best, peak
        keys = key_rows(seeds, positions)
        rows = max(1, MOST_ENTRIES // self._vocab_size)
        drawn = []
        for first in range(0, len(logits), rows):
            part = slice(first, first + rows)
            scores = logits[part].sub_(peak[part, None])
            # Rows at temperature 0 are drawn too, and discarded below.
            scores.div_(temperatures[part, None])
            weights = scores.clamp_(min=NEVER).exp_()
            drawn.append(draw_race(weights, self._mixed, keys[part]))
        tokens = drawn[0] if len(drawn) == 1 else torch.cat(drawn)
        return torch.where(temperatures > 0.0, tokens, best), peak
