"""A rehearsal of a GPU's steps on tensors without memory, so that other threads can compile the
kernels while the model is loaded."""

from __future__ import annotations

from typing import Final

import torch

from asyncinfer.attention import AttentionBatch, KVCache
from asyncinfer.config import EngineConfig
from asyncinfer.kernels import ops
from asyncinfer.layers import ForwardPass
from asyncinfer.models import Decoder
from asyncinfer.runner.caches import allocate_caches
from asyncinfer.runner.decode_graphs import batch_sizes
from asyncinfer.runner.device import choose_kv
from asyncinfer.runner.memory import plan_memory
from asyncinfer.runner.recorded_forward import RecordedForward, row_sizes, token_sizes
from asyncinfer.runner.recorded_step import RecordedStep
from asyncinfer.runner.slot_state import SlotState
from asyncinfer.runner.warm_up import SIZES
from asyncinfer.sampling import OPTION_WORDS, Draws, TokenHistory

__all__ = ["rehearse"]

#: More bytes than any cache has, since they cost nothing here.
_KV_BYTES: Final = 1 << 44


class _Nowhere:
    """A device without memory."""

    device = torch.device("meta")

    def pinned(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self.device)


@torch.inference_mode()
def rehearse(decoder: Decoder, config: EngineConfig, device: torch.device, vocab_size: int) -> None:
    """Compute the steps of `warm_up` with a decoder on torch's device "meta", in a rehearsal for
    `device`."""
    if decoder.config.state_layers:
        # States lie on pages that the host looks up; the warm-up compiles what the others need.
        return
    kv_format, nowhere = choose_kv(config.kv, device), _Nowhere()
    config = config.replace(kv_bytes=_KV_BYTES)
    spec = plan_memory(config, decoder.config, decoder.dtype, device, vocab_size)
    caches = [allocate_caches(decoder, group, spec, kv_format) for group in spec.groups]
    kv = [cache for group in caches for cache in group if isinstance(cache, KVCache)]
    if decoder.config.indexed is not None:
        # Sparse attention looks at lengths on the host: its steps are not recorded.
        for size in SIZES:
            if size <= spec.max_step_tokens:
                _as_it_is(decoder, kv, size, spec.block_size, vocab_size)
        return
    groups = [number for number, group in enumerate(caches) for _ in group]
    sizes = batch_sizes(spec.max_slots)
    state = SlotState(
        nowhere, spec.max_slots, len(spec.groups), spec.table_width, sizes[-1], OPTION_WORDS
    )
    capacity = spec.max_context + 1
    history = TokenHistory(spec.max_slots + 1, nowhere.device, capacity=capacity)
    step = RecordedStep(decoder, kv, spec, state, history, sizes[-1], spec.overlap)
    tokens = token_sizes(spec.max_step_tokens, decoder.config.hidden_size)
    rows = row_sizes(sizes[-1])
    forward = RecordedForward(
        *(nowhere, decoder, kv, spec, state, history),
        groups=groups,
        rows=rows[-1],
        tokens=tokens[-1],
    )
    for size in SIZES:
        # Once eagerly, and once padded as in a recorded step.
        for count in {size, *(each for each in tokens if each >= size)}:
            if count <= tokens[-1] and (count == size or count <= 2 * max(SIZES)):
                forward(count, rows[0], False)
                if decoder.predictor is not None:
                    _predict(decoder, *forward.passed(count, rows[0]), vocab_size)
        hidden = forward.hidden[: min(size, sizes[-1])]
        _draws(decoder, hidden, vocab_size)
        if len(groups) == len(set(groups)):
            rows_of_step = next((each for each in sizes if each >= size), sizes[-1])
            for draws in Draws:
                step(rows_of_step, draws)


def _as_it_is(
    decoder: Decoder, kv: list[KVCache], tokens: int, block_size: int, vocab_size: int
) -> None:
    """Compute a step of one new row eagerly, and draw after each of its tokens."""
    words = torch.empty(tokens, dtype=torch.int64, device="meta")
    blocks, length, starts = (
        torch.empty(shape, dtype=torch.int32, device="meta")
        for shape in ((1, -(-tokens // block_size)), 1, 2)
    )
    row = AttentionBatch(
        *(blocks, length, starts, words, block_size), int(tokens == 1), starts=[0], counts=[tokens]
    )
    one = decoder.begin(words, kv, [row] * len(kv))
    hidden = decoder.run(words, words, one)
    if decoder.predictor is not None:
        _predict(decoder, words, hidden, one, vocab_size)
    _draws(decoder, hidden, vocab_size)


def _predict(
    decoder: Decoder,
    positions: torch.Tensor,
    hidden: torch.Tensor,
    one: ForwardPass,
    vocab_size: int,
) -> None:
    """Predict a token after each one at `positions`, which pass `one` computed, and one more."""
    states = decoder.predict(positions, positions, hidden, one)
    decoder.predict_further(positions, positions, states, one)
    _draw(decoder.predicted_logits(states)[:, :vocab_size])


def _draws(decoder: Decoder, hidden: torch.Tensor, vocab_size: int) -> None:
    """Draw from the logits of hidden states, unchanged and changed."""
    logits = decoder.logits(hidden)[:, :vocab_size]
    for each in (logits, logits.contiguous()):
        _draw(each)


def _draw(logits: torch.Tensor) -> None:
    """Draw from logits `[n, vocab]` in each way of an unrecorded step."""
    n = len(logits)
    words, reals = (
        torch.empty(n, dtype=kind, device="meta") for kind in (torch.int64, torch.float32)
    )
    keys = (words, words, reals)
    ops.sample(logits)
    ops.sample(logits, *keys)
    ops.sample(logits, *keys, top_k=words.int(), top_p=reals, min_p=reals)
