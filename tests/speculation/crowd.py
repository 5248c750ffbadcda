"""Requests of every kind of option to a small real model, in one crowded engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from fakes.fake_device import FakeDevice
from models.held import Held, OnDevice
from speculation.kinds import PROMPTS, sampled_options_of

from asyncinfer.config import Graphs
from asyncinfer.models import load_model
from asyncinfer.testing import InlineEngine
from asyncinfer.testing.oracle import EOS_ID
from asyncinfer.text import Tokenizer

__all__ = ["VOCAB", "answers", "held"]

#: Bytes, and the ends of a text.
VOCAB = 258
#: Clients name scopes, and a lone surrogate is no text.
SCOPE = "tenant \ud800"
#: Few blocks, so that requests are preempted.
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "max_context": 128,
    "max_step_tokens": 64,
    "block_size": 8,
    "max_running": 8,
    "sampler_timeout": 60.0,
}


def held(
    folder: Path,
    device: FakeDevice | None = None,
    *,
    head: Path | None = None,
    mtp: bool = False,
    graphs: Graphs = "off",
) -> Held:
    """The model in `folder`, with a head or with the layer that predicts further tokens."""
    decoder = load_model(folder, "cpu", torch.float32, max_context=128, head=head, predictor=mtp)
    text = Tokenizer.byte_level(add_bos=False, eos_id=EOS_ID)
    if device is None:
        return Held(decoder, text)
    return OnDevice(decoder, device, text, graphs=graphs)


def answers(
    source: Held, seeds: Sequence[int], predictions: Mapping[int, Any] | None = None, **config: Any
) -> tuple[list[Any], InlineEngine]:
    """Of one request for each seed: the tokens and the text of each answer, and why they ended; or
    the error."""
    engine = InlineEngine(source, **OPTIONS, **config)
    asked = [sampled_options_of(seed) for seed in seeds]
    expected = predictions or {}
    streams = [
        engine.submit(
            PROMPTS[seed % 4], prediction=expected.get(seed), cache_scope=SCOPE, **options
        )
        for seed, options in zip(seeds, asked, strict=True)
    ]
    engine.run()
    found = []
    for stream, options in zip(streams, asked, strict=True):
        stream.read()
        if stream.error is not None:
            # A word is barred that its format needs.
            assert "every one is barred" in str(stream.error)
            found.append(str(stream.error))
            continue
        reasons = [chunk.finish_reason for chunk in stream.chunks if chunk.finish_reason]
        indices = range(options["n"])
        found.append(([(stream.token_ids(i), stream.text(i)) for i in indices], sorted(reasons)))
    return found, engine
