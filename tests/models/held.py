"""`Held`: a decoder that a test has loaded, for an engine."""

from __future__ import annotations

from typing import Any

from asyncinfer import EngineConfig
from asyncinfer.engine import Loaded
from asyncinfer.models import Decoder
from asyncinfer.runner import runner_of
from asyncinfer.testing.random_model import filler_tokenizer


class Held:
    """A `ModelSource` of a decoder that is loaded already."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder

    def load(self, config: EngineConfig, progress: Any = None) -> Loaded:
        vocabulary = self._decoder.config.vocab_size
        return Loaded(runner_of(self._decoder, config, vocabulary), filler_tokenizer(vocabulary))
