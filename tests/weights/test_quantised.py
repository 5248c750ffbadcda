"""Quantised matrices in files: every part that is missing, misshapen, of another dtype or that
lies is refused with its name, before memory is taken where headers say it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quantization.quantised import BNB, CASES, KEPT, Tensors
from safetensors.torch import save_file

from asyncinfer.errors import ModelLoadError
from asyncinfer.kernels.native import laying_kernels
from asyncinfer.kernels.threads import set_thread_count
from asyncinfer.models.quantised import read_scheme
from asyncinfer.models.reader import JsonReader
from asyncinfer.quantization import BlockEnds, LaidWeight, QuantisedWeight, as_tensor
from asyncinfer.quantization.laid import laid as laid_whole
from asyncinfer.quantization.schemes import GptqMatrix, Scheme
from asyncinfer.quantization.schemes.bits import scaled
from asyncinfer.stats import LoadProgress
from asyncinfer.weights import Packed, Piece, SafetensorsCheckpoint, WeightLoader, check_weights

SHAPE = (96, 64)
#: More than one matrix, so that a tensor of the model is made of quantised and plain ones.
TABLE = {"up": Packed((Piece("m.gate.weight", SHAPE), Piece("m.up.weight", SHAPE)))}
#: Of those whose numbers stay, what is laid from the file: not those whose groups, of this size, or
#: order native code does not take.
LAID = KEPT - {"awq of 8 bits", "hqq", "hqq of 8 bits"}
#: What may be left out, and what nobody reads.
UNREAD = (".nbits", ".axis", ".encoded_state_dict", ".input_scale")
OPTIONAL = (".g_idx", ".shape", ".weight_format", *UNREAD)


def scheme(config: dict[str, Any]) -> Scheme:
    found = read_scheme(JsonReader({"quantization_config": config}, "config.json"))
    assert found is not None
    return found


def held(name: str) -> tuple[Tensors, torch.Tensor]:
    return CASES[name].make(*SHAPE, torch.Generator().manual_seed(2))


def load(folder: Path, name: str, parts: Tensors, **more: torch.Tensor) -> torch.Tensor:
    """The tensor of a file with a quantised `m.gate` and a plain `m.up`."""
    tensors = {f"m.gate{suffix}": part for suffix, part in parts.items()}
    tensors |= {"m.up.weight": torch.full(SHAPE, 3.0), **more}
    stored = {key: part.clone().contiguous() for key, part in tensors.items()}
    save_file(stored, folder / "model.safetensors")
    with SafetensorsCheckpoint(folder) as checkpoint, torch.inference_mode():
        found = check_weights(checkpoint, TABLE, scheme=scheme(CASES[name].config))
        args = checkpoint, TABLE, torch.device("cpu"), torch.float32, None
        # Chunks that end within rows.
        loader = WeightLoader(*args, quantised=found, chunk=1000)
        return loader("up")


@pytest.mark.parametrize("name", CASES)
def test_every_part(name: str, tmp_path: Path) -> None:
    parts, right = held(name)
    got = load(tmp_path, name, parts)
    torch.testing.assert_close(got[: SHAPE[0]], right, rtol=2e-7, atol=1e-9)
    assert torch.equal(got[SHAPE[0] :], torch.full(SHAPE, 3.0))
    for suffix, part in parts.items():
        rest = {key: other for key, other in parts.items() if key != suffix}
        tensor = f"m.gate{suffix}"
        if suffix not in OPTIONAL and suffix not in UNREAD:
            with pytest.raises(ModelLoadError) as missing:
                load(tmp_path, name, rest)
            # By the first of its names.
            assert str(missing.value.tensor).startswith("m.gate.")
            assert "missing in the checkpoint" in str(missing.value)
        if suffix in UNREAD:
            continue
        longer = torch.cat([part.reshape(-1)] * 2) if part.dim() else part.repeat(3)
        for wrong in (longer, part.reshape(*part.shape, 1, 1, 1)):
            if suffix.startswith(".weight.quant_state"):
                continue
            # bitsandbytes' blocks may have other sizes, but not another than they say.
            with pytest.raises(ModelLoadError, match=r"shape|192 scales: the blocks") as refused:
                load(tmp_path, name, {**rest, suffix: wrong})
            assert refused.value.tensor == tensor
        other = torch.zeros(part.shape, dtype=torch.int16)
        with pytest.raises(ModelLoadError, match="dtype I16") as refused:
            load(tmp_path, name, {**rest, suffix: other})
        assert refused.value.tensor == tensor


@pytest.mark.parametrize("name", CASES)
def test_numbers_stay_as_they_are(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two matrices with theirs, and one beside a plain one as floats. What native code lays a part
    at a time is bit for bit what is laid of the whole matrix."""
    first, right = held(name)
    second, below = CASES[name].make(*SHAPE, torch.Generator().manual_seed(3))
    tensors = {f"m.gate{suffix}": part for suffix, part in first.items()}
    tensors |= {f"m.up{suffix}": part for suffix, part in second.items()}
    tensors |= {f"n.up{suffix}": part for suffix, part in second.items()}
    tensors["n.gate.weight"] = torch.full(SHAPE, 3.0)
    stored = {key: part.clone().contiguous() for key, part in tensors.items()}
    save_file(stored, tmp_path / "model.safetensors")
    table = {
        which: Packed(tuple(Piece(f"{which}.{part}.weight", SHAPE) for part in ("gate", "up")))
        for which in "mn"
    }
    with SafetensorsCheckpoint(tmp_path) as checkpoint, torch.inference_mode():
        found = check_weights(checkpoint, table, scheme=scheme(CASES[name].config))
        args = checkpoint, table, torch.device("cpu"), torch.float32, None
        told: list[LoadProgress] = []
        options = {"quantised": found, "keep_packed": True}
        # Chunks that end within a matrix.
        loader = WeightLoader(*args[:-1], told.append, **options, chunk=2048)
        laid, mixed = loader("m"), loader("n")
        loader.finish()
        assert told[-1].bytes_done == told[-1].bytes_total
        monkeypatch.setattr("asyncinfer.weights.loader.laying_kernels", lambda: None)
        both = WeightLoader(*args, **options)("m")
    assert isinstance(both, QuantisedWeight) == (name in KEPT)
    if isinstance(laid, LaidWeight):
        assert isinstance(both, QuantisedWeight)
        assert laid.shape == both.shape
        twin = laid_whole(both)
        assert (laid.layout, laid.factor, laid.dtype) == (twin.layout, twin.factor, twin.dtype)
        assert torch.equal(laid.blocks, twin.blocks)
        apart = laid.grouped()
        assert torch.equal(apart.numbers, both.numbers)
        assert apart.named == both.named
        rows = torch.tensor([3, 190, 7])
        picked = laid[rows].dequantised()
        assert torch.equal(picked, laid.dequantised()[rows])
    else:
        assert name not in LAID or laying_kernels() is None
    assert isinstance(mixed, torch.Tensor)
    torch.testing.assert_close(mixed[SHAPE[0] :], below, rtol=2e-7, atol=1e-9)
    wanted = torch.cat([right, below])
    torch.testing.assert_close(as_tensor(both), wanted, rtol=1e-6, atol=1e-5)
    # Whole numbers of 4 bits have offsets in float16.
    torch.testing.assert_close(as_tensor(laid), wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.skipif(laying_kernels() is None, reason="no native code")
@pytest.mark.parametrize("name", ["gptq", "awq"])
@pytest.mark.parametrize("order", ["abc", "bca", "cba"])
def test_scales_are_prepared_beside_the_laying_of_numbers(
    name: str, order: str, tmp_path: Path
) -> None:
    """Those of the table's next matrix, whichever the model asks for next; each is read once."""
    held = {
        which: CASES[name].make(*SHAPE, torch.Generator().manual_seed(seed))
        for seed, which in enumerate("abc")
    }
    stored = {
        f"{which}.m{suffix}": part.clone().contiguous()
        for which, (parts, _) in held.items()
        for suffix, part in parts.items()
    }
    save_file(stored, tmp_path / "model.safetensors")
    table = {which: Packed((Piece(f"{which}.m.weight", SHAPE),)) for which in held}
    told: list[LoadProgress] = []
    with SafetensorsCheckpoint(tmp_path) as checkpoint, torch.inference_mode():
        found = check_weights(checkpoint, table, scheme=scheme(CASES[name].config))
        args = checkpoint, table, torch.device("cpu"), torch.float32, told.append
        loader = WeightLoader(*args, quantised=found, keep_packed=True)
        weights = {which: loader(which) for which in order}
        loader.finish()
    for which, (_, right) in held.items():
        assert isinstance(weights[which], LaidWeight)
        torch.testing.assert_close(as_tensor(weights[which]), right, rtol=1e-3, atol=1e-3)
    assert told[-1].bytes_done == told[-1].bytes_total
    tensors = [progress.tensor for progress in told[1:]]
    assert sorted(tensors) == sorted(set(tensors))
    following = min(set(held) - {order[0]})
    assert tensors.index(f"{following}.m.scales") < tensors.index(f"{order[0]}.m.qweight")


def test_a_file_with_nan_becomes_floats(tmp_path: Path) -> None:
    """No kernel computes with NaN, so that the model does."""
    parts, right = held("fp8 in blocks")
    parts[".weight"].view(torch.uint8)[95, 63] = 0x7F
    stored = {f"m.gate{suffix}": part.clone().contiguous() for suffix, part in parts.items()}
    save_file(stored, tmp_path / "model.safetensors")
    table = {"m": Packed((Piece("m.gate.weight", SHAPE),))}
    told: list[LoadProgress] = []
    with SafetensorsCheckpoint(tmp_path) as checkpoint, torch.inference_mode():
        found = check_weights(checkpoint, table, scheme=scheme(CASES["fp8 in blocks"].config))
        args = checkpoint, table, torch.device("cpu"), torch.float32, told.append
        weight = WeightLoader(*args, quantised=found, keep_packed=True, chunk=1024)("m")
    assert isinstance(weight, torch.Tensor)
    right[95, 63] = torch.nan
    torch.testing.assert_close(weight.clone(), right, rtol=2e-7, atol=1e-9, equal_nan=True)
    assert told[-1].bytes_done == told[-1].bytes_total


@pytest.mark.parametrize(
    "keep_packed",
    [
        False,
        pytest.param(
            True, marks=pytest.mark.skipif(laying_kernels() is None, reason="no native code")
        ),
    ],
)
def test_a_tile_s_operators_take_one_thread(
    keep_packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are too short to wait for another one, and tiles are shared between threads."""
    parts, right = held("gptq")
    stored = {f"m.gate{suffix}": part.clone().contiguous() for suffix, part in parts.items()}
    save_file(stored, tmp_path / "model.safetensors")
    table = {"m": Packed((Piece("m.gate.weight", SHAPE),))}
    monkeypatch.setattr("asyncinfer.weights.loader._TILE", 7 * SHAPE[1])
    seen: list[int] = []

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any) -> Any:
            seen.append(torch.get_num_threads())
            return function(*args)

        return called

    monkeypatch.setattr(GptqMatrix, "ends", watched(GptqMatrix.ends))
    monkeypatch.setattr("asyncinfer.quantization.schemes.gptq.scaled", watched(scaled))
    monkeypatch.setattr(BlockEnds, "of", watched(BlockEnds.of))
    before = torch.get_num_threads()
    if not set_thread_count(2):
        pytest.skip("the number of threads cannot be set")
    try:
        with SafetensorsCheckpoint(tmp_path) as checkpoint, torch.inference_mode():
            found = check_weights(checkpoint, table, scheme=scheme(CASES["gptq"].config))
            args = checkpoint, table, torch.device("cpu"), torch.float32, None
            weight = WeightLoader(*args, quantised=found, keep_packed=keep_packed)("m")
        assert torch.get_num_threads() == 2
    finally:
        set_thread_count(before)
    torch.testing.assert_close(as_tensor(weight), right, rtol=1e-3, atol=1e-3)
    # Tiles of seven rows, or the scales of the whole in two functions.
    assert seen == ([1, 1] if keep_packed else [1] * 14)


@pytest.mark.parametrize("name", ["floats by output", "int8 by output"])
def test_what_is_said_of_activations_changes_no_weight(name: str, tmp_path: Path) -> None:
    """Scales and zero points of static activations, and the zeros of symmetric weights."""
    parts, right = held(name)
    zero = torch.zeros(SHAPE[0], 1).to(parts[".weight"].dtype)
    said = {".input_scale": torch.tensor([0.1]), ".input_zero_point": zero[0]}
    got = load(tmp_path, name, {**parts, **said, ".weight_zero_point": zero})
    torch.testing.assert_close(got[: SHAPE[0]], right, rtol=2e-7, atol=1e-9)


def test_what_is_left_over(tmp_path: Path) -> None:
    """Scales for another engine's KV cache may be; any other tensor not."""
    parts, _ = held("fp8 in blocks")
    scale = torch.tensor(1.0)
    load(tmp_path, "fp8 in blocks", parts, **{"m.k_proj.k_scale": scale, "m.attn.v_scale": scale})
    with pytest.raises(ModelLoadError, match="left over") as refused:
        load(tmp_path, "fp8 in blocks", parts, **{"m.gate.weight_scales": scale})
    assert refused.value.tensor == "m.gate.weight_scales"


@pytest.mark.parametrize(
    ("name", "suffix", "changed"),
    [
        ("gptq", ".g_idx", torch.full((32,), 1, dtype=torch.int32)),
        ("gptq", ".g_idx", torch.full((32,), -1, dtype=torch.int32)),
        ("int4 in groups, reordered", ".weight_g_idx", torch.full((32,), 7, dtype=torch.int32)),
        ("int4 in groups", ".weight_shape", torch.tensor([32, 64])),
        ("hqq", ".shape", torch.tensor([32, 64])),
        ("bitsandbytes int8", ".weight_format", torch.tensor(2, dtype=torch.uint8)),
        ("nf4, double", ".weight.nested_absmax", torch.ones(2)),
        ("nf4, double", ".weight.absmax", torch.ones(64, dtype=torch.uint8)),
    ],
)
def test_values_that_lie(name: str, suffix: str, changed: torch.Tensor, tmp_path: Path) -> None:
    parts, _ = held(name)
    with pytest.raises(ModelLoadError) as refused:
        load(tmp_path, name, {**parts, suffix: changed})
    assert refused.value.tensor == f"m.gate{suffix}"


STATE = {"quant_type": "nf4", "blocksize": 64, "shape": list(SHAPE), "nested_blocksize": 256}


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"[]",
        b"\xff\xfe",
        b"[" * 4000,
        b" " * 5000,
        {**STATE, "nested_offset": 0.1, "quant_type": "fp4"},
        {**STATE, "nested_offset": 0.1, "blocksize": 0},
        {**STATE, "nested_offset": 0.1, "blocksize": [64]},
        {**STATE, "nested_offset": 0.1, "shape": [32, 64]},
        {**STATE, "nested_offset": 0.1, "nested_blocksize": 1 << 60},
        {**STATE, "nested_offset": "0.1"},
        {**STATE, "nested_offset": True},
        STATE,
        {**STATE, "nested_offset": float("nan")},
        {**STATE, "nested_offset": 10**400},
        {**STATE, "nested_offset": 0.1, "blocksize": 64.0},
    ],
)
def test_a_state_that_lies(said: Any, tmp_path: Path) -> None:
    parts, _ = held("nf4, double")
    suffix = ".weight.quant_state.bitsandbytes__nf4"
    data = said if isinstance(said, bytes) else json.dumps(said).encode()
    parts[suffix] = torch.tensor(list(data), dtype=torch.uint8)
    with pytest.raises(ModelLoadError) as refused:
        load(tmp_path, "nf4, double", parts)
    assert refused.value.tensor == f"m.gate{suffix}"
    assert len(str(refused.value)) < 1_000


def test_sizes_that_a_format_cannot_hold() -> None:
    for name, shape in (("gptq", (33, 32)), ("awq", (32, 30)), ("hqq", (3, 5))):
        format = scheme(CASES[name].config).format("m")
        assert format is not None
        with pytest.raises(ValueError, match="must divide"):
            format.parts(shape)
    format = scheme({**BNB, "bnb_4bit_quant_type": "nf4"}).format("m")
    assert format is not None
    with pytest.raises(ValueError, match="even"):
        format.parts((3, 5))
