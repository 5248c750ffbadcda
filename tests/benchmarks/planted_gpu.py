"""Findings of the GPU path, for `planted_findings.py`: what brings each back, and a test of it."""

from __future__ import annotations

import linecache
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import gpu_summary
import pytest
import torch
import torch.nn.functional as F
from simulation.planted import Plant, instead

from asyncinfer.kernels import streams
from asyncinfer.quantization.cuda_packed import CudaPackedLinear
from asyncinfer.runner import accelerator, device, fallbacks, model_runner, tuning, warm_up
from asyncinfer.runner.graph_executor import GraphExecutor

__all__ = ["GPU_FINDINGS"]


def _put(owner: object, name: str, value: object) -> Plant:
    return instead(owner, name, lambda _: value)


class _Never(Exception):
    """Nobody raises it."""


def _reworded(module: str, old: str, new: str) -> Plant:
    """The module's functions are made anew of its text with `new` for `old`, kernels among them."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        found = import_module(module)
        text = Path(str(found.__file__)).read_text("utf-8")
        assert old in text, f"{module} has no {old!r}"
        text = text.replace(old, new)
        name = f"<planted in {module}>"
        # Triton reads the text of a kernel where a traceback would.
        lines = len(text), None, text.splitlines(keepends=True), name
        monkeypatch.setitem(linecache.cache, name, lines)
        # The members that the text binds anew are put back when the finding is taken out.
        members = vars(found)
        for member, value in list(members.items()):
            monkeypatch.setitem(members, member, value)
        exec(compile(text, name, "exec", dont_inherit=True), members)

    return plant


def _by_name(function: Any, other: Any) -> Plant:
    """`function` does what `other` does, also for those who have imported it by name."""
    return _put(function, "__code__", other.__code__)


def _as_stored(
    name: str, stored: str, device: torch.device, cpu_halves: object = None
) -> torch.dtype:
    found = getattr(torch, (stored if name == "auto" else name).removeprefix("torch."))
    return torch.float32 if name == "auto" and device.type == "cpu" else found


def _anyhow(expression: str, workers: int) -> None: ...


def _in_floats(layer: CudaPackedLinear, x: torch.Tensor) -> torch.Tensor:
    assert layer.scales is not None
    return F.linear(x, (layer.weight * layer.scales).to(x.dtype), layer.bias)


_DECODE: Final = "asyncinfer.kernels.triton.decode_attention"
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
    "G4": (
        _by_name(gpu_summary.check_workers, _anyhow),
        "test_gpu_summary.py::test_a_gpu_is_one_workers",
    ),
    "G5": (
        _put(fallbacks, "warnings", SimpleNamespace(warn=lambda *a, **k: None)),
        "runner/test_fallbacks.py::test_the_first_is_a_warning_all_are_in_the_log",
    ),
    "G6": (
        _put(warm_up, "SIZES", (1,)),
        "runner/test_warm_up.py::test_nothing_compiles_while_a_stream_waits",
    ),
    "G7": (
        # Each row has its share of the parts, however long the others are.
        _reworded(_DECODE, "tl.cdiv(keys, parts - rows)", "tl.cdiv(keys * rows, parts - rows)"),
        "kernels/test_attention.py"
        "::test_a_long_row_is_read_by_as_many_programs_in_a_full_batch_as_alone",
    ),
    "G8": (
        _put(CudaPackedLinear, "product", _in_floats),
        "quantization/test_cuda_packed.py::test_many_tokens_read_the_numbers_too",
    ),
    "G9": (
        _put(
            streams,
            "_stream",
            lambda device: torch.cuda.Stream(device),  # type: ignore[no-untyped-call]
        ),
        "runner/test_accelerator.py::test_a_host_is_never_given_an_engines_stream",
    ),
    "G10": (
        _by_name(device.choose_dtype, _as_stored),
        "runner/test_opening.py::test_dtypes",
    ),
    "G11": (
        _reworded(_PREFILL.__name__, "MASKED=False", "MASKED=True"),
        "kernels/test_attention_compiled.py::test_only_the_last_keys_of_prompts_are_masked",
    ),
    "G12": (
        _put(GraphExecutor, "_pass_size", lambda self, arrays: (0, 0)),
        "runner/test_graph_executor.py::test_calls_of_a_prompt_beside_rows_that_decode",
    ),
    "G13": (
        _put(import_module("asyncinfer.kernels.triton.sample"), "cut_state", lambda *a: None),
        "kernels/test_sample.py::test_compiled",
    ),
    "G14": (
        _put(tuning, "use_choices", lambda choices: None),
        "runner/test_tuning.py::test_what_is_fastest_is_taken_kept_and_read_again",
    ),
}
