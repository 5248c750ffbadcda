"""Findings of the GPU path, for `planted_findings.py`: what brings each back, and a test of it.

Of the others no patch brings back what was wrong: G4 was the tests' own dtype and workers, G7, G8,
G11 and G13 stood in the text of kernels, G10 in a comparison that its test calls by name.
"""

from __future__ import annotations

from contextlib import nullcontext
from importlib import import_module
from types import SimpleNamespace
from typing import Final

import torch
from simulation.planted import Plant, instead

from asyncinfer.kernels import streams
from asyncinfer.runner import accelerator, fallbacks, model_runner, tuning, warm_up
from asyncinfer.runner.graph_executor import GraphExecutor

__all__ = ["GPU_FINDINGS"]


def _put(owner: object, name: str, value: object) -> Plant:
    return instead(owner, name, lambda _: value)


class _Never(Exception):
    """Nobody raises it."""


_PREFILL: Final = import_module("asyncinfer.kernels.triton.prefill_attention")

GPU_FINDINGS: Final[dict[str, tuple[Plant, str]]] = {
    "G1": (
        _put(model_runner, "KernelError", _Never),
        "runner/test_distrust.py::test_the_step_is_done_again_without_it",
    ),
    "G2": (
        instead(
            _PREFILL,
            "prefill_tiling",
            lambda tiling: lambda *shape: tiling(*shape[:-1], 227 << 10),
        ),
        "kernels/test_attention_compiled.py::test_what_has_little_shared_memory_and_what_is_new",
    ),
    "G3": (
        _put(accelerator, "_copied_random_state", lambda device: nullcontext()),
        "runner/test_accelerator.py::test_the_hosts_random_numbers_are_its_own",
    ),
    "G5": (
        _put(fallbacks, "warnings", SimpleNamespace(warn=lambda *a, **k: None)),
        "runner/test_fallbacks.py::test_the_first_is_a_warning_all_are_in_the_log",
    ),
    "G6": (
        _put(warm_up, "SIZES", (1,)),
        "runner/test_warm_up.py::test_nothing_compiles_while_a_stream_waits",
    ),
    "G9": (
        _put(
            streams,
            "_stream",
            lambda device: torch.cuda.Stream(device),  # type: ignore[no-untyped-call]
        ),
        "runner/test_accelerator.py::test_a_host_is_never_given_an_engines_stream",
    ),
    "G12": (
        _put(GraphExecutor, "_pass_size", lambda self, arrays: (0, 0)),
        "runner/test_graph_executor.py::test_calls_of_a_prompt_beside_rows_that_decode",
    ),
    "G14": (
        _put(tuning, "use_choices", lambda choices: None),
        "runner/test_tuning.py::test_what_is_fastest_is_taken_kept_and_read_again",
    ),
}
