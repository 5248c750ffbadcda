"""One checkpoint with random weights: as transformers computes it, and as a family reads it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncinfer.testing.decoder_run import DecoderRun

if TYPE_CHECKING:
    import torch

    from asyncinfer.models import Decoder, ModelConfig
    from asyncinfer.models.family_calls import FamilyCalls

__all__ = ["FamilyTrial", "pieces", "runs"]


class FamilyTrial:
    """`config` is transformers'; the checkpoint is written to `folder` by transformers itself. It
    is that of `like` where all weights are equal. Raises whatever transformers raises of a config
    that it does not take."""

    def __init__(
        self,
        model_class: Any,
        config: Any,
        folder: Path,
        seed: int,
        like: FamilyTrial | None = None,
    ) -> None:
        import torch

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self._model = model_class._from_config(config, attn_implementation="eager")
        self._model = self._model.float().eval()
        generator = torch.Generator().manual_seed(seed)
        std = 1.2 * config.hidden_size**-0.5
        with torch.no_grad():
            held = self._model.state_dict()
            # Buffers of the checkpoint that are no parameters get noise, too.
            buffers = [each for name, each in self._model.named_buffers() if name in held]
            for tensor in (*self._model.parameters(), *buffers):
                noise = torch.empty_like(tensor).normal_(0.0, std, generator=generator)
                # A norm's weight stays near its initial value, one or zero.
                tensor.copy_(noise if tensor.dim() > 1 else tensor + noise)
        #: Whether all weights are those of `like`.
        self.alike = like is not None and _equal(held, like._model.state_dict())
        if like is None or not self.alike:
            folder.mkdir(parents=True, exist_ok=True)
            self._model.save_pretrained(folder)
        self.folder: Path = like.folder if like is not None and self.alike else folder
        self.values: dict[str, Any] = json.loads(self._model.config.to_json_string())

    def right(self, ids: Sequence[int]) -> torch.Tensor:
        """The logits of transformers, float32 `[tokens, vocab]`."""
        import torch

        with torch.inference_mode():
            logits: torch.Tensor = self._model(torch.tensor([ids])).logits[0]
        return logits.float().clone()

    def read(self, calls: FamilyCalls, changes: Mapping[str, Any] | None = None) -> ModelConfig:
        """The config that the family reads from `config.json`, with some keys changed."""
        return calls.read({**self.values, **(changes or {})}, "config.json")

    def load(self, config: ModelConfig, folder: Path | None = None) -> Decoder:
        """The decoder of that shape with the weights in `folder`, or the checkpoint's own.
        `ModelLoadError` for tensors that are missing, left over or of another shape."""
        import torch

        from asyncinfer.models import Decoder, tensor_table
        from asyncinfer.models.leftovers import ignored_tensor
        from asyncinfer.models.suited import suited
        from asyncinfer.weights import SafetensorsCheckpoint, WeightLoader, check_weights

        with SafetensorsCheckpoint(folder or self.folder) as checkpoint, torch.inference_mode():
            config = suited(config, checkpoint)
            table = tensor_table(config)
            check_weights(checkpoint, table, partial(ignored_tensor, config=config))
            loader = WeightLoader(checkpoint, table, torch.device("cpu"), torch.float32, None)
            return Decoder(config, loader)

    def changed(self, folder: Path, add: str | None = None, drop: str | None = None) -> Path:
        """Write the weights to `folder`, with some tensors added or dropped."""
        import torch
        from safetensors.torch import load_file, save_file

        file = "model.safetensors"
        tensors = load_file(self.folder / file)
        if add is not None:
            tensors[add] = torch.ones(3)
        if drop is not None:
            del tensors[drop]
        folder.mkdir(exist_ok=True)
        save_file(tensors, folder / file, metadata={"format": "pt"})
        return folder

    def tensors(self) -> list[str]:
        """Names of the checkpoint's tensors, one for all layers."""
        from asyncinfer.weights import SafetensorsCheckpoint

        with SafetensorsCheckpoint(self.folder) as checkpoint:
            groups = {re.sub(r"\d+", "*", name): name for name in checkpoint.tensors}
        return sorted(groups.values())


def _equal(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)


def pieces(
    decoder: Decoder, ids: Sequence[int], counts: Sequence[int] = (7, 1, 1, 16, 1)
) -> DecoderRun:
    """One sequence in chunks of `counts` and a rest; in one pass if tokens attend to later ones."""
    run = DecoderRun(decoder, [ids])
    if decoder.config.bidirectional:
        run.step({0: len(ids)})
        return run
    for count in (*counts, len(ids) - sum(counts)):
        run.step({0: count})
    return run


def runs(decoder: Decoder, ids: Sequence[Sequence[int]]) -> dict[str, DecoderRun]:
    """The sequences computed in several ways; the last two begin with the same 32 tokens."""
    whole = DecoderRun(decoder, ids)
    whole.step({row: len(sequence) for row, sequence in enumerate(ids)})
    if decoder.config.bidirectional:
        return {"whole prompts": whole}
    mixed = DecoderRun(decoder, ids)
    last, other = len(ids) - 1, len(ids) - 2
    mixed.step({0: 20, other: 32})
    mixed.share(last, other, 32)
    for _ in range(4):
        mixed.step(dict.fromkeys((0, last, other), 1))
    mixed.step({row: len(ids[row]) - mixed.done[row] for row in (0, last, other)})
    return {
        "whole prompts": whole,
        "in chunks": pieces(decoder, ids[0]),
        "in a batch, after a prefix hit": mixed,
    }
