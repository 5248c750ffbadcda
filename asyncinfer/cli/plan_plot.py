"""The plot of a plan: a decode step against the number of its sequences."""

from __future__ import annotations

from pathlib import Path

from asyncinfer.bench import BenchError
from asyncinfer.planner import Plan

__all__ = ["save_plan_plot"]


def save_plan_plot(found: Plan, path: Path) -> None:
    """Draw the parts of a decode step's floor, and tokens a second, by batch. Raises
    `BenchError`."""
    from matplotlib.figure import Figure

    fit = found.formats[0].sequences
    last = max(256, found.batch, fit)
    batches = tuple(1 << exponent for exponent in range(last.bit_length() + 1))
    floors = found.decode_floors(batches)
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    step, rate = figure.subplots(1, 2)
    for label, seconds in (
        ("weights", [floor.weights for floor in floors]),
        ("arithmetic", [floor.compute for floor in floors]),
        ("KV", [floor.kv for floor in floors]),
    ):
        step.plot(batches, [1e3 * value for value in seconds], linestyle=":", label=label)
    step.plot(batches, [1e3 * floor.seconds for floor in floors], color="black", label="step")
    step.set_ylabel("ms, at least")
    rate.plot(
        batches,
        [batch / floor.seconds for batch, floor in zip(batches, floors, strict=True)],
        color="black",
    )
    rate.set_ylabel("tokens/s, at most")
    for axes in (step, rate):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel(f"sequences of {found.context:,} tokens")
        if fit:
            axes.axvline(fit, color="tab:red", label=f"{fit:,} fit")
        axes.legend()
    figure.suptitle(
        f"{found.architecture}, {found.dtype}, {found.gpu.title}: a decode step", fontsize="medium"
    )
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise BenchError(f"{path}: cannot be written: {error.strerror}") from error
