"""`load_model`: streaming, packing, and every kind of broken checkpoint refused before any device
memory is taken."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from models.checkpoints import Sequences, expected, random_llama, save
from safetensors.torch import load_file, save_file

from asyncinfer.builtin import MODEL_PATH
from asyncinfer.errors import ModelLoadError
from asyncinfer.models import (
    Decoder,
    LoadProgress,
    load_model,
    read_config,
    tensor_table,
)
from asyncinfer.models import load as load_module
from asyncinfer.weights import WeightLoader

Q = "model.layers.0.self_attn.q_proj.weight"


def load(folder: Path, **options: Any) -> Decoder:
    return load_model(folder, "cpu", torch.float32, **options)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(random_llama(), tmp_path)


@pytest.fixture
def no_memory_taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fails the test if loading gets as far as allocating a weight."""
    asked: list[str] = []
    monkeypatch.setattr(WeightLoader, "__call__", lambda self, name: asked.append(name))
    yield
    assert asked == []


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def shard(folder: Path, pieces: int = 3) -> dict[str, str]:
    """Split the checkpoint over shards with an index; gives the index's map."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for number in range(pieces):
        file = f"model-{number + 1:05d}-of-{pieces:05d}.safetensors"
        part = names[number::pieces]
        save_file({name: tensors[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    write_index(folder, weight_map)
    return weight_map


def write_index(folder: Path, weight_map: Any) -> None:
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_shards_and_progress(folder: Path) -> None:
    model = random_llama()
    shard(folder)
    seen: list[LoadProgress] = []
    decoder = load(folder, progress=seen.append)
    ids = torch.arange(40) % 199
    run = Sequences(decoder, [ids])
    run.step(s0=40)
    torch.testing.assert_close(run.logits[0], expected(model, ids), rtol=0, atol=1e-4)

    total = sum(tensor.numel() * 4 for tensor in model.state_dict().values())
    assert (seen[0].bytes_done, seen[0].tensor) == (0, "")
    assert seen[-1].bytes_done == total
    assert {step.bytes_total for step in seen} == {total}
    assert sorted(step.tensor for step in seen[1:]) == sorted(model.state_dict())
    done = [step.bytes_done for step in seen]
    assert done == sorted(set(done))


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
def test_stored_in_any_float(folder: Path, stored: torch.dtype) -> None:
    rewrite(folder, lambda tensors: tensors.update({k: v.to(stored) for k, v in tensors.items()}))
    decoder = load(folder)
    assert decoder.dtype is torch.float32
    exact = load_file(folder / "model.safetensors")["model.embed_tokens.weight"].float()
    assert torch.equal(decoder.embedding.weight, exact)


def test_progress_that_raises_ends_the_load(folder: Path) -> None:
    def stop(step: LoadProgress) -> None:
        if step.bytes_done:
            raise InterruptedError("enough")

    with pytest.raises(InterruptedError, match="enough"):
        load(folder, progress=stop)


def test_old_extras_are_ignored(tmp_path: Path) -> None:
    folder = save(random_llama(tie_word_embeddings=True), tmp_path)
    rewrite(
        folder,
        lambda tensors: tensors.update(
            {
                "lm_head.weight": torch.zeros(199, 64),
                "model.layers.1.self_attn.rotary_emb.inv_freq": torch.zeros(8),
            }
        ),
    )
    load(folder)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("nothing left"),
        MemoryError("nothing left"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: nothing left"),
        RuntimeError("CUDA error: out of memory: nothing left"),
    ],
)
def test_out_of_memory(folder: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def full(*args: object, **_: object) -> None:
        raise error

    monkeypatch.setattr(load_module, "Decoder", full)
    with pytest.raises(ModelLoadError, match=r"cpu has no room for the weights: .*nothing left"):
        load(folder)


def test_another_error_stays_what_it_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **_: object) -> None:
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(load_module, "Decoder", broken)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        load(folder)


BROKEN: dict[str, tuple[Callable[[dict[str, torch.Tensor]], object], str, str]] = {
    "missing": (lambda t: t.pop(Q), Q, "missing in the checkpoint"),
    "left over": (
        lambda t: t.update({"model.layers.2.mlp.down_proj.weight": torch.ones(64, 112)}),
        "model.layers.2.mlp.down_proj.weight",
        "left over",
    ),
    "a bias nobody asked for": (
        lambda t: t.update({Q.replace("weight", "bias"): torch.ones(64)}),
        Q.replace("weight", "bias"),
        "left over",
    ),
    "wrong shape": (
        lambda t: t.update({Q: torch.ones(64, 65)}),
        Q,
        r"shape \[64, 65\], config.json makes it \[64, 64\]",
    ),
    "turned": (
        lambda t: t.update({"model.layers.1.mlp.down_proj.weight": torch.ones(112, 64)}),
        "model.layers.1.mlp.down_proj.weight",
        r"shape \[112, 64\]",
    ),
    "flat": (lambda t: t.update({Q: torch.ones(64 * 64)}), Q, "shape"),
    "integers": (lambda t: t.update({Q: torch.ones(64, 64).int()}), Q, "dtype I32"),
    "float8": (
        lambda t: t.update({Q: torch.ones(64, 64).to(torch.float8_e4m3fn)}),
        Q,
        "dtype F8_E4M3",
    ),
}


@pytest.mark.usefixtures("no_memory_taken")
@pytest.mark.parametrize("name", sorted(BROKEN))
def test_broken_tensors(folder: Path, name: str) -> None:  # fault 45
    change, tensor, why = BROKEN[name]
    rewrite(folder, change)
    with pytest.raises(ModelLoadError, match=why) as caught:
        load(folder)
    assert caught.value.tensor == tensor
    assert caught.value.file is not None


@pytest.mark.usefixtures("no_memory_taken")
@pytest.mark.parametrize(
    ("changes", "tensor"),
    [
        ({"vocab_size": 200}, "model.embed_tokens.weight"),  # fault 46
        ({"num_hidden_layers": 3}, "model.layers.2.input_layernorm.weight"),
        ({"num_hidden_layers": 1}, "model.layers.1.input_layernorm.weight"),
        ({"intermediate_size": 64}, "model.layers.0.mlp.gate_proj.weight"),
        ({"num_key_value_heads": 4}, "model.layers.0.self_attn.k_proj.weight"),
        ({"head_dim": 32}, Q),
        ({"attention_bias": True}, "model.layers.0.self_attn.q_proj.bias"),
    ],
)
def test_a_config_of_another_model(folder: Path, changes: dict[str, Any], tensor: str) -> None:
    # fault 45
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(ModelLoadError) as caught:
        load(folder)
    assert caught.value.tensor == tensor


@pytest.mark.usefixtures("no_memory_taken")
def test_a_head_that_is_missing(tmp_path: Path) -> None:  # fault 45
    folder = save(random_llama(tie_word_embeddings=True), tmp_path, tie_word_embeddings=False)
    with pytest.raises(ModelLoadError) as caught:
        load(folder)
    assert caught.value.tensor == "lm_head.weight"


@pytest.mark.usefixtures("no_memory_taken")
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("keep", [0, 4, 100, 0.5, -1])
def test_truncated_files(folder: Path, sharded: bool, keep: float) -> None:  # fault 45
    if sharded:
        shard(folder)
    path = sorted(folder.glob("*.safetensors"))[-1]
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * keep) if isinstance(keep, float) else keep])
    with pytest.raises(ModelLoadError, match="cannot be read") as caught:
        load(folder)
    assert caught.value.file == path.name


@pytest.mark.usefixtures("no_memory_taken")
def test_shards_that_disagree_with_their_index(folder: Path) -> None:  # fault 45
    weight_map = shard(folder)
    first, second, *_ = sorted(set(weight_map.values()))
    names = sorted(weight_map)

    def refused(changed: dict[str, str], why: str) -> ModelLoadError:
        write_index(folder, changed)
        with pytest.raises(ModelLoadError, match=why) as caught:
            load(folder)
        return caught.value

    other = second if weight_map[names[0]] == first else first
    error = refused({**weight_map, names[0]: other}, "the index names it, the shard lacks it")
    assert (error.tensor, error.file) == (names[0], other)
    error = refused({k: v for k, v in weight_map.items() if k != names[4]}, "left over")
    assert (error.tensor, error.file) == (names[4], weight_map[names[4]])
    error = refused({**weight_map, "ghost": first}, "the shard lacks it")
    assert error.tensor == "ghost"
    error = refused({**weight_map, "ghost": "model-9.safetensors"}, "shard is missing")
    assert error.file == "model-9.safetensors"

    write_index(folder, weight_map)
    twice = load_file(folder / second)
    twice[next(iter(load_file(folder / first)))] = torch.ones(1)
    save_file(twice, folder / second)
    with pytest.raises(ModelLoadError, match=f"occurs twice, also in {first}") as caught:
        load(folder)
    assert caught.value.file == second


def test_table_names_every_tensor_once() -> None:
    config = read_config(MODEL_PATH)
    names = [piece.name for packed in tensor_table(config).values() for piece in packed.pieces]
    assert sorted(names) == sorted(load_file(MODEL_PATH / "model.safetensors"))
