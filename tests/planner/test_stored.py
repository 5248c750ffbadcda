"""Plans of GGUF files: by the bytes that the file has."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from models.families import random_model, randomised
from models.gguf_files import write_gguf
from models.published import CONFIGS
from models.test_gguf_hybrids import config_of
from quantization.quantised import group as compressed
from quantization.quantised import hqq_config
from weights.hub import Hub
from weights.test_gguf import written

from asyncinfer.cli import main
from asyncinfer.errors import ModelLoadError
from asyncinfer.models import examine, parse_config, read_config
from asyncinfer.planner import ModelSize, Plan, find_gpu, plan, plan_config
from asyncinfer.planner.stored import stored_types
from asyncinfer.weights import resolve

Q = gguf.GGMLQuantizationType


def stored(found: Plan) -> dict[str, tuple[int, int]]:
    return {one.name: (one.tensors, one.bytes) for one in found.stored}


def in_the_file(*paths: Path) -> dict[str, tuple[int, int]]:
    """What the `gguf` package reads."""
    found: dict[str, tuple[int, int]] = {}
    for path in paths:
        for tensor in gguf.GGUFReader(path).tensors:
            count, size = found.get(tensor.tensor_type.name, (0, 0))
            found[tensor.tensor_type.name] = count + 1, size + int(tensor.n_bytes)
    return found


@pytest.mark.parametrize(
    "kind", ["lfm2", "granite-4", "kimi-linear", "nemotron-h", "gemma4-experts", "llama4", "glm-5"]
)
def test_what_is_loaded_is_what_is_planned_and_checked(kind: str, tmp_path: Path) -> None:
    """The matrices of layers that a plan finds in the file are those of the decoder's config."""
    path = write_gguf(randomised(config_of(kind, 0)), tmp_path / "model.gguf")
    checked = examine(path)
    assert (checked.problems, checked.config) == ((), read_config(path))
    types = stored_types(path)
    assert checked.parameters == sum(one.numbers for one in types)
    size = ModelSize.of(read_config(path))
    assert sum(one.linear_numbers for one in types) == size.linear + size.experts


@pytest.mark.parametrize("kind", [Q.F32, Q.BF16, Q.Q8_0, Q.Q4_1], ids=lambda kind: kind.name)
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_the_bytes_of_each_type(family: str, kind: Q, tmp_path: Path) -> None:
    path = write_gguf(random_model(family, "plain"), tmp_path / "model.gguf", kind)
    found = plan(path, context=64)
    assert stored(found) == in_the_file(path)
    first, second, *_ = found.formats
    assert (first.format, second.format) == ("as stored", "bfloat16")
    # Matrices are as in the file, what is looked up or small is in bfloat16.
    floats = re.compile(r"token_embd|.*ffn_gate_inp")
    right = sum(
        int(tensor.n_bytes)
        if tensor.tensor_type in (Q.Q8_0, Q.Q4_1) and not floats.match(tensor.name)
        else 2 * int(tensor.n_elements)
        for tensor in gguf.GGUFReader(path).tensors
    )
    # By way of the model's own count of its parameters.
    assert first.weight_bytes == pytest.approx(right, rel=1e-3)
    if kind is Q.Q4_1:
        assert first.weight_bytes < second.weight_bytes
        assert first.decode_floor < second.decode_floor
        assert found.decode_floors((1,))[0].seconds == first.decode_floor


def test_a_folder_of_one_file(tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    path = write_gguf(random_model("llama", "plain"), tmp_path / "made" / "model.gguf", Q.Q8_0)
    folder = tmp_path / "only"
    folder.mkdir()
    path.rename(folder / "model.gguf")
    assert stored(plan(folder, context=64)) == in_the_file(folder / "model.gguf")


def test_a_split_model(tmp_path: Path) -> None:
    values = np.ones((2, 64), np.float32)
    parts = [
        written(
            tmp_path / f"m-0000{part}-of-00002.gguf", {f"blk.{part}.ffn_up.weight": (kind, data)}
        )
        for part, kind, data in ((1, Q.F32, values), (2, Q.Q8_0, gguf.quantize(values, Q.Q8_0)))
    ]
    found = {one.name: (one.tensors, one.bytes) for one in stored_types(parts[0])}
    assert found == in_the_file(*parts) == {"F32": (1, 512), "Q8_0": (1, 136)}


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_gguf(random_model("llama", "plain"), tmp_path / "model.gguf", Q.Q8_0)
    for options in ([], ["--json"]):
        with pytest.raises(SystemExit) as caught:
            main(["plan", str(path), "--context", "64", *options])
        assert not caught.value.code
    table, told = capsys.readouterr().out.split("\n{", 1)
    count, _ = in_the_file(path)["Q8_0"]
    assert f"stored as Q8_0: {count} tensors, " in table
    assert [row["format"] for row in json.loads("{" + told)["formats"]][:2] == [
        "as stored",
        "bfloat16",
    ]


def test_what_has_not_been_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan fetches no weights."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for model in ("smollm2", "org/name:model.gguf"):
        with pytest.raises(ModelLoadError, match=rf"fetch it first: asyncinfer pull {model}"):
            plan(model)


def test_a_file_of_the_hub_that_was_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(random_model("llama", "plain"), tmp_path / "model.gguf", Q.Q8_0)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    with Hub("org/name", {"model.gguf": path.read_bytes()}).serve() as hub:
        resolve("org/name:model.gguf", endpoint=hub.url)
    assert stored(plan("org/name:model.gguf", context=64)) == in_the_file(path)


LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}
GROUP = {"num_bits": 4, "strategy": "group", "group_size": 128}


@pytest.mark.parametrize(
    ("config", "bits", "on_gpu"),
    [
        # Zero points become float16 offsets, and scales of blocks those of each row.
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 4 + (16 + 4) / 128, 4 + 32 / 128),
        ({"quant_method": "gptq", "bits": 8, "group_size": 64}, 8 + (16 + 8) / 64, 8 + 32 / 64),
        ({"quant_method": "awq", "bits": 4, "group_size": 64}, 4 + (16 + 4) / 64, 4 + 32 / 64),
        (
            {"quant_method": "fp8", "weight_block_size": [128, 128]},
            *(8 + 32 / 128**2, 8 + 16 / 128),
        ),
        ({"quant_method": "fp8", "activation_scheme": "static"}, 8, 8),
        (
            {**compressed("pack-quantized", **GROUP), "ignore": ["lm_head"]},
            *(4 + 16 / 128, 4 + 32 / 128),
        ),
        # No kernel of a GPU reads it.
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4 + 32 / 64, 16),
        (hqq_config(4, 64, 1), 4 + 2 * 16 / 64, 4 + 2 * 16 / 64),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 4 + 8 / 16, 4 + 16 / 16),
    ],
    ids=lambda value: str(value)[:40],
)
def test_quantised_checkpoints(config: dict[str, Any], bits: float, on_gpu: float) -> None:
    read = parse_config({**LLAMA_8B, "quantization_config": config})
    found = plan_config(read, gpu=find_gpu("h200"))
    assert [one.name for one in found.stored] == [config["quant_method"], "bfloat16"]
    one, rest = found.stored
    assert one.linear_numbers == one.numbers == 6_979_321_856
    assert one.bytes * 8 / one.numbers == pytest.approx(bits, rel=1e-3)
    assert one.numbers + rest.numbers == found.parameters
    first, second, *_ = found.formats
    assert (first.format, second.format) == ("as stored", "bfloat16")
    right = one.numbers * on_gpu / 8 + rest.bytes
    assert first.weight_bytes == pytest.approx(right, rel=1e-3)
    assert second.weight_bytes == 2 * found.parameters


def test_a_published_one() -> None:
    """The model card of gpt-oss-20b says that its checkpoint has 12.8 GiB."""
    found = plan_config(parse_config(CONFIGS["gpt-oss-20b"]), gpu=find_gpu("h200"))
    assert round(found.formats[0].weight_bytes / 2**30, 1) == 12.8


def test_a_matrix_that_cannot_be_held() -> None:
    config = {"quant_method": "awq", "bits": 4, "group_size": 64}
    read = parse_config({**LLAMA_8B, "intermediate_size": 99, "quantization_config": config})
    with pytest.raises(ModelLoadError, match=r"a matrix of \[99, 4096\]: 99 outputs"):
        plan_config(read, gpu=find_gpu("h200"))
