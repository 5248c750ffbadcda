"""What is refused of an adapter, by the name of the key or tensor, before memory is taken."""

from __future__ import annotations

import json
import mmap
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from adapters.embedded import CONFIG, random_tensors
from safetensors.torch import save_file

from asyncinfer import ModelLoadError
from asyncinfer.adapters import AdapterPool, LoraConfig, check_adapter, open_adapter, slot_memory
from asyncinfer.adapters.pool import LoadedAdapter
from asyncinfer.builtin import MODEL_PATH
from asyncinfer.kernels.native import lora_kernel
from asyncinfer.models import read_config

MODULE = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture
def pool() -> AdapterPool:
    config = read_config(MODEL_PATH)
    return AdapterPool(config, torch.device("cpu"), torch.float32, max_adapters=2, max_rank=8)


def saved(folder: Path, tensors: dict[str, torch.Tensor] | None = None, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({**CONFIG, **config}))
    save_file(tensors or random_tensors(0), folder / "adapter_model.safetensors")
    return folder


def load(pool: AdapterPool, source: Any, config: dict[str, Any] | None = None) -> LoadedAdapter:
    with open_adapter(source, config) as files:
        return pool.load(check_adapter(files, pool.layout, pool.max_rank))


def test_a_folder_and_a_state_dict_are_the_same(pool: AdapterPool, tmp_path: Path) -> None:
    tensors = random_tensors(0)
    load(pool, saved(tmp_path, tensors, r=4))
    named = {name.replace(".weight", ".default.weight"): t for name, t in tensors.items()}
    load(pool, named, CONFIG)
    for weights in pool.layers[torch.float32].values():
        assert weights.host_ranks == [4, 4]
        assert torch.equal(weights.down[0], weights.down[1])
        assert torch.equal(weights.up[0], weights.up[1])


def test_matrices_of_16_bits_stay_so_where_that_is_exact(pool: AdapterPool) -> None:
    """Answers are those of the same numbers in float32, in every mixture of dtypes."""
    if lora_kernel(torch.bfloat16) is None:
        pytest.skip("no kernel for this machine")
    model, cpu = read_config(MODEL_PATH), torch.device("cpu")
    whole = AdapterPool(model, cpu, torch.float32, max_adapters=2, max_rank=8)
    half = {name: tensor.bfloat16() for name, tensor in random_tensors(0).items()}
    other = {name: tensor.half() for name, tensor in random_tensors(1).items()}
    # Of an odd scale the numbers have more bits than a file's.
    odd = {**CONFIG, "lora_alpha": 3.1}
    for files, config, bits in (
        ((half, half), CONFIG, (16, 16)),
        ((half, other), CONFIG, (16, 16)),
        ((half, half), odd, (32, 32)),
        ((random_tensors(0), other), CONFIG, (32, 16)),
    ):
        held = [load(pool, tensors, config) for tensors in files]
        wide = [load(whole, {n: t.float() for n, t in one.items()}, config) for one in files]
        for one, right, size in zip(held, wide, bits, strict=True):
            assert one.bytes * 32 == right.bytes * size
        slots = np.array([held[0].slot, -1, held[1].slot, held[0].slot])
        theirs = np.array([wide[0].slot, -1, wide[1].slot, wide[0].slot])
        long = np.repeat(slots, 40)
        for name, layer in list(pool.layout.layers.items())[:4]:
            x = torch.randn(4, layer.inputs)
            y, expected = torch.zeros(2, 4, sum(layer.sizes))
            pool.rows(slots).add(name, x, y)
            whole.rows(theirs).add(name, x, expected)
            assert torch.equal(y, expected)
            assert y[0].any()
            assert not y[1].any()
            # As a prompt's.
            many = torch.zeros(160, sum(layer.sizes))
            pool.rows(long).part(0, 160).add(name, x.repeat_interleave(40, 0), many)
            torch.testing.assert_close(many[::40], expected, rtol=1e-4, atol=1e-4)
        pool.release(held[1])
        # Others than that of the one that is left are given back.
        assert list(pool.layers) == [torch.bfloat16 if bits[0] == 16 else torch.float32]
        pool.release(held[0])
        for one in wide:
            whole.release(one)
    assert pool.layers == {}
    assert pool.bytes == 0


def test_a_slot_holds_memory_for_one_dtype(
    pool: AdapterPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after it had an adapter of another, which others are still held in."""
    monkeypatch.setattr("asyncinfer.adapters.pool.lora_kernel", lambda dtype: object())
    half = {name: tensor.bfloat16() for name, tensor in random_tensors(0).items()}
    first = load(pool, half, CONFIG)
    load(pool, half, CONFIG)
    pool.release(first)
    assert load(pool, random_tensors(1), CONFIG).slot == first.slot
    for weights in pool.layers[torch.bfloat16].values():
        assert not weights.down[first.slot].any()
        assert not weights.up[first.slot].any()
        assert weights.host_ranks[first.slot] == 0
        assert weights.down[1 - first.slot].any()
    assert pool.layers[torch.float32]


def test_a_slot_holds_nothing_of_an_adapter_that_failed_midway(pool: AdapterPool) -> None:
    small = random_tensors(1, 2)
    stays = load(pool, small, CONFIG)
    with open_adapter(random_tensors(0, 8), CONFIG) as files:
        adapter = check_adapter(files, pool.layout, pool.max_rank)
        whole = list(adapter.matrices())
        name = whole[0][0].name

        class Failing:
            dtype, rank, config = adapter.dtype, adapter.rank, adapter.config

            def matrices(self) -> Iterator[Any]:
                layer, down, up = whole[0]
                # Its second copy fails.
                yield layer, down, up[:, :1].expand(-1, 3)

        with pytest.raises(RuntimeError, match="must match"):
            pool.load(Failing())  # type: ignore[arg-type]
    second = load(pool, small, CONFIG)
    weights = pool.layers[torch.float32][name]
    assert torch.equal(weights.down[second.slot], weights.down[stays.slot])
    assert torch.equal(weights.up[second.slot], weights.up[stays.slot])


def test_a_dtype_stays_while_an_adapter_of_it_is_loaded(
    pool: AdapterPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the last one that was held in it is given back meanwhile."""
    held = [load(pool, random_tensors(0), CONFIG)]

    def release() -> None:
        while held:
            pool.release(held.pop())

    monkeypatch.setattr("asyncinfer.adapters.pool.check_cancelled", release)
    slot = load(pool, random_tensors(1), CONFIG).slot
    assert not held
    for weights in pool.layers[torch.float32].values():
        assert weights.host_ranks[slot]
        assert weights.down[slot].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_slot_holds_nothing_of_its_last_adapter(pool: AdapterPool, dtype: torch.dtype) -> None:
    """One of a larger rank, which changes more layers."""

    def tensors(*arguments: Any) -> dict[str, torch.Tensor]:
        return {name: tensor.to(dtype) for name, tensor in random_tensors(*arguments).items()}

    small = tensors(1, 2, ("mlp.down_proj",))
    stays, first = load(pool, small, CONFIG), load(pool, tensors(0, 8), CONFIG)
    pool.release(first)
    second = load(pool, small, CONFIG)
    assert second.slot == first.slot
    (layers,) = pool.layers.values()
    for weights in layers.values():
        assert weights.host_ranks[second.slot] == weights.ranks[second.slot]
        assert weights.host_ranks[second.slot] == weights.host_ranks[stays.slot]
        assert torch.equal(weights.down[second.slot], weights.down[stays.slot])
        assert torch.equal(weights.up[second.slot], weights.up[stays.slot])


@pytest.mark.skipif(not hasattr(mmap, "MADV_DONTNEED"), reason="no madvise")
def test_what_is_forgotten_goes_back_to_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole pages of it, and none beside it."""
    advised: list[tuple[int, int]] = []
    advise = slot_memory.advise
    assert advise is not None

    def spied(address: Any, length: Any, advice: int) -> int:
        advised.append((address.value, length.value))
        return int(advise(address, length, advice))

    monkeypatch.setattr(slot_memory, "advise", spied)
    page = mmap.PAGESIZE
    matrices = slot_memory.zeros(torch.device("cpu"), torch.float32, 3, page)
    matrices.fill_(1.0)
    slot_memory.forget(matrices[1, 10:])
    assert matrices[0].all()
    assert matrices[1, :10].all()
    assert matrices[2].all()
    assert not matrices[1, 10:].any()
    ((address, length),) = advised
    assert address % page == length % page == 0
    assert length >= 2 * page
    assert matrices[1, 10:].data_ptr() <= address
    assert address + length <= matrices[2].data_ptr()
    slot_memory.forget(matrices[1, :10])
    assert len(advised) == 1, "it has no whole page"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type='IA3'"),
        ({"use_dora": True}, "use_dora=True: not supported: DoRA"),
        ({"bias": "all"}, "bias='all'"),
        ({"init_lora_weights": "pissa_niter_16"}, "init_lora_weights='pissa_niter_16'"),
        ({"init_lora_weights": "OLoRA"}, "init_lora_weights='OLoRA': changed"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save=\\['lm_head'\\]: not supported"),
        ({"lora_bias": True}, "lora_bias=True"),
        ({"lora_alpha": 0}, "lora_alpha=0: must be in"),
        ({"lora_alpha": "x"}, "lora_alpha='x': must be a number"),
        ({"r": 2.5}, "r=2.5: must be an integer"),
        ({"r": 3}, "_proj.lora_A.weight: rank 4, its config makes it 3"),
        ({"use_rslora": 1}, "use_rslora=1"),
        ({"rank_pattern": {"q_proj": 5}}, "q_proj.lora_A.weight: rank 4, its config makes it 5"),
        ({"rank_pattern": {"(a*)*b": 5}}, "rank_pattern: .*must be the name of a module"),
        ({"rank_pattern": {"(.|.)" * 40: 5}}, "rank_pattern: .*must be the name of a module"),
        ({"rank_pattern": {".?" * 60: 5}}, "rank_pattern: .*must be the name of a module"),
        ({"rank_pattern": {".*" * 4: 5}}, "rank_pattern: .*must be the name of a module"),
        ({"alpha_pattern": dict.fromkeys((f".*.*.*{i}" for i in range(5)), 5)}, "takes too long"),
        ({"r": 10**400}, r"r=1000.*must be in \(0, 1e9\]"),
        ({"lora_alpha": 10**400}, "lora_alpha=1000.*must be in"),
        ({"alpha_pattern": {"q(": 5}}, "alpha_pattern: 'q\\('"),
        ({"alpha_pattern": {"q": -1}}, "alpha_pattern\\['q'\\]=-1"),
    ],
)
def test_configs(pool: AdapterPool, tmp_path: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        load(pool, saved(tmp_path, **config))
    assert pool.layers == {}


def test_what_a_config_says_is_said_of_it(pool: AdapterPool, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError) as refused:
        load(pool, saved(tmp_path, use_dora=True))
    assert refused.value.file == str(tmp_path / "adapter_config.json")
    with pytest.raises(ModelLoadError) as refused:
        load(pool, random_tensors(0), {**CONFIG, "use_dora": True})
    assert str(refused.value) == "file the given config: use_dora=True: not supported: DoRA"


def _changed(**tensors: torch.Tensor | None) -> dict[str, torch.Tensor]:
    whole: dict[str, Any] = {**random_tensors(0), **tensors}
    return {name: tensor for name, tensor in whole.items() if tensor is not None}


A, B = f"{MODULE}.lora_A.weight", f"{MODULE}.lora_B.weight"


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({A: torch.ones(4, 255)}, f"tensor {A}: shape \\[4, 255\\], .* \\[rank, 256\\]"),
        ({A: torch.ones(256)}, f"tensor {A}: shape"),
        ({A: torch.ones(0, 256)}, f"tensor {A}: shape"),
        ({B: torch.ones(255, 4)}, f"tensor {B}: shape \\[255, 4\\], .* \\[256, 4\\]"),
        ({B: torch.ones(256, 3)}, f"tensor {B}: shape"),
        ({A: torch.ones(9, 256), B: torch.ones(256, 9)}, f"tensor {A}: rank 9: max_adapter_rank=8"),
        ({B: None}, f"tensor {A}: its module lacks the other"),
        ({A: torch.full((4, 256), torch.nan)}, f"tensor {A}: has numbers that are not finite"),
        ({f"{MODULE}.lora_magnitude_vector": torch.ones(4)}, "lora_magnitude_vector: DoRA"),
        ({f"{MODULE}.base_layer.bias": torch.ones(256)}, "base_layer.bias: is no lora_A"),
        ({f"{MODULE}.lora_B.bias": torch.ones(256)}, "a bias of the adapter"),
        ({"base_model.model.lm_head.base_layer.weight": torch.ones(4, 4)}, "or of the head is not"),
        ({"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(4)}, "an embedding"),
        ({"base_model.model.lm_head.modules_to_save.weight": torch.ones(4)}, "trained whole"),
        (
            {"base_model.model.lm_head.lora_A.weight": torch.ones(4, 256),
             "base_model.model.lm_head.lora_B.weight": torch.ones(4096, 4)},
            "no module lm_head; modules that take adapters are down_proj, gate_proj",
        ),
        (
            {"base_model.model.model.embed_tokens.lora_A.weight": torch.ones(4, 256),
             "base_model.model.model.embed_tokens.lora_B.weight": torch.ones(4096, 4)},
            "no adapter can be applied to model.embed_tokens",
        ),
        (
            {"base_model.model.model.layers.9.mlp.up_proj.lora_A.weight": torch.ones(4, 256),
             "base_model.model.model.layers.9.mlp.up_proj.lora_B.weight": torch.ones(640, 4)},
            "the model has no module model.layers.9.mlp.up_proj",
        ),
    ],
)  # fmt: skip
def test_tensors(
    pool: AdapterPool, tmp_path: Path, tensors: dict[str, torch.Tensor], message: str
) -> None:
    with pytest.raises(ModelLoadError, match=message):
        load(pool, saved(tmp_path, _changed(**tensors)))
    with pytest.raises(ModelLoadError, match=message):
        load(pool, _changed(**tensors), CONFIG)
    # A slot that was begun is free again.
    load(pool, random_tensors(1), CONFIG)
    load(pool, random_tensors(2), CONFIG)


@pytest.mark.parametrize(
    "source",
    [
        *("/nowhere", "./none", "~/none", "none", "a/b/c", "a/b..c", "nul\0", ""),
        *("~a-user-of-another-machine/x", "x" * 5000),
    ],
)
def test_neither_a_folder_nor_a_hub_id(pool: AdapterPool, source: str) -> None:
    with pytest.raises(ModelLoadError, match="is no folder of an adapter"):
        load(pool, source)


def test_sources(pool: AdapterPool, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="is no folder of an adapter"):
        load(pool, tmp_path / "none")
    with pytest.raises(ModelLoadError, match=r"there is no adapter_config\.json"):
        load(pool, tmp_path)
    folder = saved(tmp_path / "a")
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(ModelLoadError, match=r"adapter_model\.bin is pickled"):
        load(pool, folder)
    with pytest.raises(ModelLoadError, match="needs config="):
        load(pool, random_tensors(0))
    with pytest.raises(ModelLoadError, match="has no tensors"):
        load(pool, {}, CONFIG)
    with pytest.raises(ModelLoadError, match="lora_alpha is missing"):
        load(pool, random_tensors(0), {"peft_type": "LORA"})
    with pytest.raises(ModelLoadError, match="must be floating"):
        load(pool, {A: torch.ones(4, 256).int()}, CONFIG)
    for tensor in (torch.ones(4, 256, device="meta"), torch.eye(4, 256).to_sparse()):
        with pytest.raises(ModelLoadError, match=f"^tensor {re.escape(A)}: .*: must be dense"):
            load(pool, {A: tensor}, CONFIG)


def test_each_entry_is_compiled_once() -> None:
    """An adapter of a model with 80 layers may name each of its modules: compiled for each module
    again, they took a quarter of a minute."""
    modules = [f"layers.{layer}.{name}" for layer in range(80) for name in "abcdefg"]
    values = {"lora_alpha": 8, "r": 4, "rank_pattern": dict.fromkeys(modules, 3)}
    config = LoraConfig.read(values, "f")
    compiled = 0

    def count(frame: FrameType, event: str, called: object) -> None:
        nonlocal compiled
        code = frame.f_code
        compiled += (
            event == "call" and code.co_name == "compile" and "_compiler" in code.co_filename
        )

    sys.setprofile(count)
    try:
        assert [config.rank_of(modules[-1]) for _ in range(3)] == [3, 3, 3]
    finally:
        sys.setprofile(None)
    assert 0 < compiled <= len(modules)


def test_patterns_of_real_adapters() -> None:
    layers = "|".join(str(number) for number in range(32))
    pattern = rf".*\.layers\.({layers})\..*(q|k)_proj"
    config = LoraConfig.read({"lora_alpha": 8, "rank_pattern": {pattern: 3}, "r": 4}, "f")
    assert config.rank_of("model.layers.31.self_attn.k_proj") == 3
    assert config.rank_of("model.layers.32.self_attn.k_proj") == 4


def test_patterns_name_modules_as_the_adapter_does(pool: AdapterPool) -> None:
    """One that was trained within a model of images and text has more names before it."""
    wrapped = "model.language_model.layers.0.self_attn.q_proj"
    tensors = {
        name.replace("model.model.layers", "model.model.language_model.layers"): tensor
        for name, tensor in random_tensors(0).items()
    }
    ups = []
    for config in ({"alpha_pattern": {wrapped: 2 * CONFIG["lora_alpha"]}}, {}):
        with open_adapter(tensors, {**CONFIG, **config}) as files:
            matrices = check_adapter(files, pool.layout, pool.max_rank).matrices()
            ups.append(next(up for _, _, up in matrices))
    outputs = tensors[f"base_model.model.{wrapped}.lora_B.weight"].shape[0]
    assert torch.equal(ups[0][:, :outputs], 2 * ups[1][:, :outputs])
    assert torch.equal(ups[0][:, outputs:], ups[1][:, outputs:])


def test_scales() -> None:
    plain = LoraConfig.read({"lora_alpha": 8, "alpha_pattern": {r"layers\.1\..*q_proj": 2}}, "f")
    assert plain.scale("model.layers.0.self_attn.q_proj", 4) == 2.0
    assert plain.scale("model.layers.1.self_attn.q_proj", 4) == 0.5
    assert plain.scale("model.layers.11.self_attn.q_proj", 4) == 2.0
    root = LoraConfig.read({"lora_alpha": 8, "use_rslora": True}, "f")
    assert root.scale("model.layers.0.self_attn.q_proj", 4) == 4.0
