"""This processor as if it had fewer instructions."""

from __future__ import annotations

import platform

import pytest

from asyncinfer.kernels.native.host import Host, host, host_of

__all__ = ["assembly_for_units", "host_with_lanes", "host_without"]


def host_without(*names: str) -> Host:
    """It lacks the features whose names begin so."""
    here = host()
    assert here is not None
    flags = {flag[1:]: flag[0] == "+" for flag in here.features.split(",")}
    flags = {name: on and not name.startswith(names) for name, on in flags.items()}
    found = host_of(platform.machine(), flags)
    assert found is not None
    return found


def host_with_lanes(lanes: int) -> Host:
    """Its vectors have this many float32 numbers. The test is skipped where they are narrower."""
    found = host_without("avx512") if lanes == 8 else host_without()
    if found.lanes != lanes:
        pytest.skip("the processor has narrower vectors")
    return found


def assembly_for_units(text: str) -> str:
    """What LLVM's assembly becomes for a processor with matrix units (AMX)."""
    from llvmlite import binding

    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    features = "+avx512f,+avx512bw,+avx512bf16,+amx-tile,+amx-bf16"
    machine = binding.Target.from_triple("x86_64-unknown-linux-gnu").create_target_machine(
        features=features, opt=2
    )
    made: str = machine.emit_assembly(binding.parse_assembly(text))
    return made
