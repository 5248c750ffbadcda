"""A real model with random weights, made where it runs: `Engine(RandomModel(config))`."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from asyncinfer.config import EngineConfig
from asyncinfer.engine import Loaded
from asyncinfer.text import Tokenizer

if TYPE_CHECKING:
    import torch

    from asyncinfer.models import ModelConfig

__all__ = ["RandomModel", "filler_tokenizer"]

_STD = 0.02


class RandomModel:
    """A `ModelSource` of any architecture at any size, without files: matrices are normal (std
    0.02), norms and biases near what does nothing. Speed is that of the trained model: GPUs take
    less power, and run faster, on zeros. Its tokens are whole strings that mean nothing.

    Args:
        config: the model's shape.
        dtype: dtype of the weights, such as "bfloat16"; None leaves it to the engine's `dtype`.
        seed: seed of the weights, which depend on the device too.
    """

    def __init__(self, config: ModelConfig, *, dtype: str | None = None, seed: int = 0) -> None:
        self.config = config
        self.dtype = dtype
        self.seed = seed

    def load(self, config: EngineConfig, progress: Any = None) -> Loaded:
        # Imported here: fakes need no torch.
        import torch

        from asyncinfer.models import Decoder, tensor_table
        from asyncinfer.runner import runner_of
        from asyncinfer.runner.device import choose_device, choose_dtype, prepare_threads

        device = choose_device(config.device)
        prepare_threads(config, device)
        dtype = choose_dtype(self.dtype or config.dtype, self.config.dtype, device)
        table = tensor_table(self.config)
        generator = torch.Generator(device).manual_seed(self.seed)
        plus_one = self.config.norm.endswith("plus-one")

        def weights(name: str) -> torch.Tensor:
            packed = table[name]
            tensor = torch.empty(packed.shape, dtype=packed.held_in(dtype), device=device)
            tensor.normal_(0.0, _STD, generator=generator)
            if "norm" in name.rpartition(".")[0].rpartition(".")[2] and name.endswith("weight"):
                tensor.add_(0.0 if plus_one else 1.0)
            return tensor

        with torch.inference_mode():
            decoder = Decoder(self.config, weights, config.max_context, config.weights)
        vocab = self.config.vocab_size
        return Loaded(runner_of(decoder, config, vocab), filler_tokenizer(vocab))


def filler_tokenizer(size: int) -> Tokenizer:
    """A byte-level tokenizer of `size` tokens: every byte, then words that no merge makes."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = (
        "".join(letters)
        for length in itertools.count(2)
        for letters in itertools.product("abcdefghijklmnopqrstuvwxyz", repeat=length)
    )
    tokens = itertools.islice(itertools.chain(alphabet, words), size)
    vocabulary = {token: number for number, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend)
