"""transformers' own `generate`, in static batches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from asyncinfer.bench.peers.worker import Setup

__all__ = ["TransformersPeer", "open_peer"]


def open_peer(setup: Setup) -> TransformersPeer:
    """See `worker.Peer`."""
    torch.set_num_threads(setup["threads"])
    dtype = getattr(torch, setup["dtype"])
    return TransformersPeer(Path(setup["folder"]), setup["running"], dtype)


class TransformersPeer:
    """A model on the CPU. Greedy, past the end of text, `running` requests at a time in the order
    of submission; a batch runs until its longest answer is done."""

    def __init__(self, folder: Path, running: int, dtype: torch.dtype = torch.float32) -> None:
        from transformers import AutoModelForCausalLM, __version__
        from transformers.utils import logging

        logging.disable_progress_bar()
        self.version = __version__
        self.running = running
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        # No token may end an answer early.
        self.model.generation_config.eos_token_id = None

    def warm(self, prefix: list[int]) -> None:
        """It has no prefix cache."""

    def run(self, requests: Sequence[tuple[list[int], int]], shared: int) -> list[list[int]]:
        """See `worker.Peer`."""
        answers: list[list[int]] = []
        for first in range(0, len(requests), self.running):
            batch = requests[first : first + self.running]
            longest = max(tokens for _, tokens in batch)
            rows = self.generate([prompt for prompt, _ in batch], longest).tolist()
            answers += [row[:tokens] for row, (_, tokens) in zip(rows, batch, strict=True)]
        return answers

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int) -> torch.Tensor:
        """Token ids of the answers, `[prompts, tokens]`. Prompts are padded on the left."""
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(p)) + list(p) for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        with torch.inference_mode():
            answer: torch.Tensor = self.model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=tokens,
                do_sample=False,
                pad_token_id=0,
                # Set even if the checkpoint disables it: nobody would serve without a cache.
                use_cache=True,
            )
        return answer[:, longest:]
