"""The peer of `asyncinfer bench serve`: transformers' own `generate`, in static batches."""

from __future__ import annotations

import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from asyncinfer.bench.record import BenchError
from asyncinfer.bench.workloads import MAX_RUNNING, Workload

__all__ = ["TransformersPeer", "require_transformers"]


def require_transformers() -> None:
    """Raise `BenchError` without transformers: better before a long run."""
    if find_spec("transformers") is None:
        raise BenchError(
            "the peer needs transformers: pip install 'asyncinfer[bench]', or --no-peer"
        )


class TransformersPeer:
    """A model in float32 on the CPU. Greedy, past the end of text, `MAX_RUNNING` requests at a
    time in the order of submission; a batch goes on until its longest answer is done."""

    def __init__(self, folder: Path) -> None:
        """Raises `BenchError` without transformers."""
        require_transformers()
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        # The benchmark shows progress itself.
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        # Nothing may end an answer early.
        self.model.generation_config.eos_token_id = None

    def run(self, workload: Workload, prompts: Sequence[Sequence[int]]) -> float:
        """Seconds for all requests."""
        outputs = [output for _, output in workload.requests]
        began = time.perf_counter()
        for first in range(0, len(prompts), MAX_RUNNING):
            batch = slice(first, first + MAX_RUNNING)
            self.generate(prompts[batch], max(outputs[batch]))
        return time.perf_counter() - began

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
                # Even if the checkpoint says otherwise: nobody would serve without a cache.
                use_cache=True,
            )
        answer = answer[:, longest:]
        if answer.shape[1] != tokens:
            raise BenchError(f"the peer gave {answer.shape[1]} of {tokens} tokens")
        return answer
