"""Chooses a device's tiles and splits by measurement when an engine opens."""

from __future__ import annotations

import torch

from asyncinfer.config import EngineConfig
from asyncinfer.kernels.child_process import NoProcess
from asyncinfer.kernels.choice_records import ChoiceRecords, measure_in_child
from asyncinfer.kernels.choices import Choices, current_choices, use_choices
from asyncinfer.kernels.dispatch import wants_triton
from asyncinfer.kernels.measured_cases import TuningShapes
from asyncinfer.kernels.measuring import measure_choices
from asyncinfer.kernels.trial import TrialShapes
from asyncinfer.models import ModelConfig, tensor_table

__all__ = ["choose_tuning", "tuning_shapes"]


def tuning_shapes(model: ModelConfig, trial: TrialShapes) -> TuningShapes:
    """The shapes for measuring the kernels of a model, whose trial has the shapes `trial`."""
    products = {(model.vocab_size, model.hidden_size): None}
    for name, packed in tensor_table(model).items():
        matrix = name.endswith(".weight") and len(packed.shape) == 2
        if name.startswith("layers.") and matrix and ".experts." not in name:
            products[packed.shape[0], packed.shape[1]] = None
    return TuningShapes(trial=trial, products=tuple(products))


def choose_tuning(
    config: EngineConfig,
    model: ModelConfig,
    trial: TrialShapes,
    device: torch.device,
    records: ChoiceRecords | None = None,
    *,
    draft: bool = False,
) -> None:
    """Have this thread's kernels take what was measured on `device`, or now, as `config` says;
    called before weights take memory and before anybody waits. `records`: None takes the user's. A
    `draft` model adds its shapes to those of the one that it drafts for."""
    before = current_choices() if draft else {}
    found: Choices = {}
    tuned = device.type == "cuda" and wants_triton() and config.kernel_tuning != "off"
    if tuned and not config.deterministic:
        shapes = tuning_shapes(model, trial)
        found = _found(config, shapes, device, records or ChoiceRecords())
    use_choices({**found, **before})


def _found(
    config: EngineConfig, shapes: TuningShapes, device: torch.device, records: ChoiceRecords
) -> Choices:
    kept = records.read(shapes, device)
    if kept is not None or config.kernel_tuning == "cached":
        return kept or {}
    if config.kernel_trial == "inline":
        return records.keep(shapes, device, list(measure_choices(shapes, device)))
    try:
        measured = measure_in_child(shapes, device)
    except NoProcess:
        # A crashing candidate must not take the program with it, so nothing is measured here.
        return {}
    return records.keep(shapes, device, measured)
