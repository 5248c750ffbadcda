"""Which modules of a model take an adapter, by the names that its published checkpoint has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from asyncinfer.models import ModelConfig
from asyncinfer.models.arrangement import arranged
from asyncinfer.models.tensors import tensor_table
from asyncinfer.quantization import as_tensor

__all__ = ["AdaptedModule", "LoraLayer", "LoraLayout", "lora_layout"]

#: Linear layers of a decoder layer that adapters may be applied to.
_ADAPTED = ("attention.qkv", "attention.out", "mlp.up", "mlp.down", "shared.up", "shared.down")


@dataclass(frozen=True, slots=True)
class LoraLayer:
    """A linear layer of the decoder, with the projections that it packs."""

    #: By its name in the tensor table.
    name: str
    inputs: int
    #: Outputs of each projection.
    sizes: tuple[int, ...]

    @property
    def elements_per_rank(self) -> int:
        """Elements of both matrices that one rank takes."""
        return len(self.sizes) * self.inputs + sum(self.sizes)


@dataclass(frozen=True, slots=True)
class AdaptedModule:
    """A module that has an adapter: projection `part` of `layer`."""

    layer: LoraLayer
    part: int


@dataclass(frozen=True, slots=True)
class LoraLayout:
    """Which parts of a model take adapters."""

    #: The config that the published checkpoint has: a GGUF file's differs in names and order.
    config: ModelConfig
    layers: Mapping[str, LoraLayer]
    #: By the module's name in the published checkpoint, without what wraps the decoder.
    modules: Mapping[str, AdaptedModule]
    #: Modules that have weights and take no adapter.
    others: frozenset[str]

    @property
    def elements_per_rank(self) -> int:
        """Elements that one rank takes in an adapter of every module."""
        return sum(layer.elements_per_rank for layer in self.layers.values())

    def find(self, module: str) -> AdaptedModule | None:
        """The module of an adapter, by PEFT's name of it without `base_model.model.`. Models that
        wrap the decoder have more or fewer names before it."""
        layers = f"{self.config.names.layers}."
        for name in (module, f"{layers}{module.rpartition(f'.{layers}')[2]}"):
            for candidate in (name, self.config.names.prefix + name):
                if candidate in self.modules:
                    return self.modules[candidate]
        return None

    def arrange(self, layer: LoraLayer, up: torch.Tensor) -> torch.Tensor:
        """`up` `[outputs, rank]`, a matrix of all projections, with its rows in the decoder's
        order."""
        # `up` has its outputs where the published weight has them, and so is arranged as that is.
        stored = up.t() if self.config.names.transposed else up
        return as_tensor(arranged(self.config, lambda _: stored)(f"{layer.name}.weight"))


def lora_layout(config: ModelConfig) -> LoraLayout:
    """The layout of a decoder's adapters."""
    published = config.published or config
    layers: dict[str, LoraLayer] = {}
    modules: dict[str, AdaptedModule] = {}
    others: set[str] = set()
    for name, packed in tensor_table(published).items():
        if not name.endswith(".weight") and "." in name:
            continue
        layer = name.removesuffix(".weight")
        pieces = [(piece.name.removesuffix(".weight"), piece.shape) for piece in packed.pieces]
        number, _, linear = layer.partition("layers.")[2].partition(".")
        predicts = published.predicts and number == str(published.num_layers - 1)
        if linear not in _ADAPTED or predicts:
            others.update(module for module, _ in pieces)
            continue
        shapes = [shape[::-1] if published.names.transposed else shape for _, shape in pieces]
        sizes = tuple(shape[0] for shape in shapes)
        layers[layer] = LoraLayer(layer, shapes[0][1], sizes)
        for part, (module, _) in enumerate(pieces):
            modules[module] = AdaptedModule(layers[layer], part)
    return LoraLayout(published, layers, modules, frozenset(others))
