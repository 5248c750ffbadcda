"""Reading one tensor of an open checkpoint."""

from __future__ import annotations

from typing import Any

import torch

from asyncinfer.weights import TensorFiles, torch_dtype


def read(checkpoint: TensorFiles[Any], name: str) -> torch.Tensor:
    stored = checkpoint.tensors[name]
    tensor = torch.empty(stored.shape, dtype=torch_dtype(stored.dtype))
    checkpoint.reader.read(stored.file, name, 0, tensor.view(-1).view(torch.uint8).numpy().data)
    return tensor
