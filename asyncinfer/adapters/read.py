"""`check_adapter`: an adapter's tensors against the model, before any memory is taken for them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from asyncinfer.adapters.config import LoraConfig
from asyncinfer.adapters.files import AdapterFiles
from asyncinfer.adapters.modules import AdaptedModule, LoraLayer, LoraLayout
from asyncinfer.errors import ModelLoadError

__all__ = ["CheckedAdapter", "check_adapter"]

_PREFIX = "base_model.model."
#: Endings of tensor names that only another kind of adapter has, and that kind.
_KINDS = (
    ("lora_magnitude_vector", "DoRA"),
    ("lora_embedding_A", "an adapter of an embedding"),
    ("lora_embedding_B", "an adapter of an embedding"),
    ("lora_A.bias", "a bias of the adapter"),
    ("lora_B.bias", "a bias of the adapter"),
    ("modules_to_save", "a module that is trained whole"),
    # PEFT saves the weight itself of these alone.
    (".base_layer.weight", "an adapter of an embedding or of the head"),
)


@dataclass(frozen=True, slots=True)
class _Pair:
    """The two matrices of one module."""

    module: str
    down: str
    up: str
    rank: int


@dataclass(frozen=True, slots=True)
class CheckedAdapter:
    """An adapter that fits the model. Its tensors are read when they are asked for."""

    config: LoraConfig
    #: The largest of its modules' ranks.
    rank: int
    _files: AdapterFiles
    _layout: LoraLayout
    #: By the decoder's linear layer: the pairs of its projections, by number.
    _pairs: dict[str, dict[int, _Pair]]

    @property
    def dtype(self) -> torch.dtype:
        """What all of its tensors are stored in; float32 where they differ."""
        found = {self._files.dtype(name) for name in self._files.shapes}
        (one, *others) = found
        return one if one is not None and not others else torch.float32

    def matrices(self) -> Iterator[tuple[LoraLayer, torch.Tensor, torch.Tensor]]:
        """For each linear layer that it changes: `[rank * parts, inputs]` and `[rank, outputs]` as
        `LoraWeights` has them, in float32, the second one scaled. Raises `ModelLoadError` where
        numbers are not finite."""
        for name, pairs in self._pairs.items():
            layer = self._layout.layers[name]
            parts, rank = len(layer.sizes), max(pair.rank for pair in pairs.values())
            down = torch.zeros(rank, parts, layer.inputs, dtype=torch.float32)
            up = torch.zeros(sum(layer.sizes), rank, dtype=torch.float32)
            for part, pair in pairs.items():
                down[: pair.rank, part] = self._tensor(pair.down)
                first = sum(layer.sizes[:part])
                scale = self.config.scale(pair.module, pair.rank)
                columns = self._tensor(pair.up).mul(scale)
                up[first : first + layer.sizes[part], : pair.rank] = columns
            arranged = self._layout.arrange(layer, up)
            yield layer, down.view(rank * parts, -1), arranged.t().contiguous()

    def _tensor(self, name: str) -> torch.Tensor:
        tensor = self._files.tensor(name).detach().to("cpu", torch.float32)
        if not bool(tensor.isfinite().all()):
            raise ModelLoadError(
                "has numbers that are not finite", file=self._files.source, tensor=name
            )
        return tensor


def check_adapter(files: AdapterFiles, layout: LoraLayout, max_rank: int) -> CheckedAdapter:
    """Raises `ModelLoadError`, naming the tensor, unless every tensor belongs to a module that
    takes adapters, has its shape, and a rank of at most `max_rank`."""
    config = LoraConfig.read(files.config, files.config_source)
    halves: dict[str, dict[str, str]] = {}
    for name in files.shapes:
        module, half = _module(name, files.source)
        if half in halves.setdefault(module, {}):
            raise ModelLoadError("its module has it twice", file=files.source, tensor=name)
        halves[module][half] = name
    if not halves:
        raise ModelLoadError("has no tensors", file=files.source)
    pairs: dict[str, dict[int, _Pair]] = {}
    for module, names in halves.items():
        (one, *_) = names.values()
        if len(names) < 2:
            raise ModelLoadError(
                "its module lacks the other of lora_A and lora_B", file=files.source, tensor=one
            )
        found = layout.find(module)
        if found is None:
            raise ModelLoadError(_no_place(module, layout), file=files.source, tensor=one)
        pair = _checked(module, found, names, files, config, max_rank)
        if found.part in pairs.setdefault(found.layer.name, {}):
            raise ModelLoadError("its module has it twice", file=files.source, tensor=one)
        pairs[found.layer.name][found.part] = pair
    most = max(pair.rank for each in pairs.values() for pair in each.values())
    return CheckedAdapter(config, most, files, layout, pairs)


def _module(name: str, source: str) -> tuple[str, str]:
    """The module of a tensor, and "A" or "B"."""
    for end, kind in _KINDS:
        if end in name:
            raise ModelLoadError(f"{kind} is not supported", file=source, tensor=name)
    stem = name.removesuffix(".weight")
    for half in "AB":
        # A model's own state dict has the adapter's name at the end.
        head, found, tail = stem.rpartition(f".lora_{half}")
        if found and "." not in tail.removeprefix("."):
            return head.removeprefix(_PREFIX), half
    raise ModelLoadError("is no lora_A or lora_B of a module", file=source, tensor=name)


def _no_place(module: str, layout: LoraLayout) -> str:
    takes = ", ".join(sorted({name.rpartition(".")[2] for name in layout.modules}))
    known = f"modules that take adapters are {takes}"
    ends = {name.rpartition(".")[2] for name in layout.others}
    if module in layout.others or module.rpartition(".")[2] in ends or ".experts." in module:
        return f"no adapter can be applied to {module}; {known}"
    return f"the model has no module {module}; {known}"


def _checked(
    module: str,
    adapted: AdaptedModule,
    names: dict[str, str],
    files: AdapterFiles,
    config: LoraConfig,
    max_rank: int,
) -> _Pair:
    layer, outputs = adapted.layer, adapted.layer.sizes[adapted.part]
    down, up = (files.shapes[names[half]] for half in "AB")
    rank = down[0] if len(down) == 2 else 0
    wanted = config.rank_of(module)
    if len(down) != 2 or rank < 1 or down[1] != layer.inputs:
        expected = f"[{'rank' if wanted is None else wanted}, {layer.inputs}]"
        raise ModelLoadError(
            f"shape {list(down)}, the model makes it {expected}",
            file=files.source,
            tensor=names["A"],
        )
    if wanted is not None and rank != wanted:
        raise ModelLoadError(
            f"rank {rank}, its config makes it {wanted}", file=files.source, tensor=names["A"]
        )
    if rank > max_rank:
        raise ModelLoadError(
            f"rank {rank}: max_adapter_rank={max_rank}", file=files.source, tensor=names["A"]
        )
    if up != (outputs, rank):
        raise ModelLoadError(
            f"shape {list(up)}, the model makes it [{outputs}, {rank}]",
            file=files.source,
            tensor=names["B"],
        )
    return _Pair(module, names["A"], names["B"], rank)
