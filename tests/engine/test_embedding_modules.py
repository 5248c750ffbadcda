"""Embedding checkpoints: `modules.json` says how vectors are made. The oracle is transformers and
the modules' arithmetic by hand."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import Gemma3TextConfig, Gemma3TextModel, Qwen3Config, Qwen3Model

from asyncinfer import Engine, InvalidRequest, ModelLoadError
from asyncinfer.builtin import MODEL_PATH
from asyncinfer.models import parse_config

pytestmark = pytest.mark.asyncio

TEXTS = ["a", "def add(a, b): return a + b", "Hello, world"]
PROMPT = "Query: "
SHAPE: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
}
DENSE = [(32, 48, True, "linear.Identity"), (48, 24, False, "activation.Tanh")]


def write(path: Path, name: str, values: object) -> None:
    (path / name).parent.mkdir(exist_ok=True)
    (path / name).write_text(json.dumps(values))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models without a head, as embedding checkpoints are saved."""
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(20261123)
    sizes = json.loads((Path(MODEL_PATH) / "config.json").read_text())
    shape = {**SHAPE, "vocab_size": sizes["vocab_size"]}
    kinds: dict[str, tuple[Any, Any]] = {
        "qwen3": (Qwen3Config, Qwen3Model),
        "gemma3": (Gemma3TextConfig, Gemma3TextModel),
    }
    for name, (config, model) in kinds.items():
        model(config(**shape, pad_token_id=0)).save_pretrained(folder / name)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(Path(MODEL_PATH) / file, folder / name / file)
    return folder


@pytest.fixture
def checkpoint(base: Path, tmp_path: Path) -> Callable[..., Path]:
    def make(name: str, pooling: dict[str, Any], dense: int = 0, normalize: bool = True) -> Path:
        folder = tmp_path / name
        shutil.copytree(base / name, folder)
        kinds = ["Transformer", "Pooling", *["Dense"] * dense, *["Normalize"] * normalize]
        modules = [
            {
                "idx": index,
                "name": str(index),
                "path": f"{index}_{kind}" if index else "",
                "type": f"sentence_transformers.models.{kind}",
            }
            for index, kind in enumerate(kinds)
        ]
        write(folder, "modules.json", modules)
        write(folder, "1_Pooling/config.json", {"word_embedding_dimension": 32, **pooling})
        for index, (inputs, outputs, bias, activation) in enumerate(DENSE[:dense], 2):
            config = {
                "in_features": inputs,
                "out_features": outputs,
                "bias": bias,
                "activation_function": f"torch.nn.modules.{activation}",
            }
            write(folder, f"{index}_Dense/config.json", config)
            tensors = {"linear.weight": torch.randn(outputs, inputs)}
            if bias:
                tensors["linear.bias"] = torch.randn(outputs)
            save_file(tensors, folder / f"{index}_Dense" / "model.safetensors")
        prompts = {"prompts": {"query": PROMPT, "document": ""}, "default_prompt_name": None}
        write(folder, "config_sentence_transformers.json", prompts)
        return folder

    return make


def by_hand(folder: Path, ids: list[list[int]], pooling: str, dense: int) -> torch.Tensor:
    """Vectors of token ids, before they are normalised."""
    from safetensors.torch import load_file
    from transformers import AutoModel

    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    rows = []
    with torch.inference_mode():
        for each in ids:
            states = model(torch.tensor([each])).last_hidden_state[0]
            rows.append(states.mean(0) if pooling == "mean" else states[-1])
    vectors = torch.stack(rows)
    for index, (_, _, bias, activation) in enumerate(DENSE[:dense], 2):
        tensors = load_file(folder / f"{index}_Dense" / "model.safetensors")
        vectors = vectors @ tensors["linear.weight"].T
        if bias:
            vectors = vectors + tensors["linear.bias"]
        if activation.endswith("Tanh"):
            vectors = vectors.tanh()
    return vectors


@pytest.mark.parametrize(
    ("name", "pooling", "dense", "normalize"),
    [
        ("qwen3", "lasttoken", 0, True),
        ("qwen3", "mean_tokens", 1, False),
        ("gemma3", "mean_tokens", 2, True),
    ],
)
async def test_vectors_are_those_of_the_modules(
    checkpoint: Callable[..., Path], name: str, pooling: str, dense: int, normalize: bool
) -> None:
    modes = {"pooling_mode_cls_token": False, f"pooling_mode_{pooling}": True}
    folder = checkpoint(name, modes, dense, normalize)
    kind = "mean" if pooling == "mean_tokens" else "last"
    async with Engine(folder, dtype="float32") as engine:
        encode = engine.tokenizer.encode
        want = by_hand(folder, [encode(text) for text in TEXTS], kind, dense)
        done = await engine.embed(TEXTS)
        given = want / want.norm(dim=1, keepdim=True) if normalize else want
        np.testing.assert_allclose(done.vectors, given.numpy(), rtol=0, atol=1e-4)
        plain = await engine.embed(TEXTS, normalize=False)
        np.testing.assert_allclose(plain.vectors, want.numpy(), rtol=0, atol=1e-4)
        few = await engine.embed(TEXTS, normalize=False, dimensions=5)
        np.testing.assert_allclose(few.vectors, want[:, :5].numpy(), rtol=0, atol=1e-4)
        with pytest.raises(InvalidRequest, match="dimensions"):
            await engine.embed(TEXTS, dimensions=want.shape[1] + 1)
        named = await engine.embed(TEXTS, prompt_name="query")
        put = await engine.embed([PROMPT + text for text in TEXTS])
        np.testing.assert_array_equal(named.vectors, put.vectors)
        with pytest.raises(InvalidRequest, match="prompt_name='other': must be one of document"):
            await engine.embed(TEXTS, prompt_name="other")
        other = "last" if kind == "mean" else "mean"
        turned = by_hand(folder, [encode(text) for text in TEXTS], other, dense)
        chosen = await engine.embed(TEXTS, pooling=other, normalize=False)  # type: ignore[arg-type]
        np.testing.assert_allclose(chosen.vectors, turned.numpy(), rtol=0, atol=1e-4)


async def test_a_default_prompt(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint("qwen3", {"pooling_mode": "lasttoken"})
    config = {"prompts": {"query": PROMPT}, "default_prompt_name": "query"}
    write(folder, "config_sentence_transformers.json", config)
    async with Engine(folder) as engine:
        with_prompt = await engine.embed(["a"])
        ids = await engine.embed([engine.tokenizer.encode(PROMPT + "a")])
        np.testing.assert_array_equal(with_prompt.vectors, ids.vectors)


def change(file: str, **values: Any) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        known = json.loads((folder / file).read_text()) if (folder / file).exists() else {}
        write(folder, file, {**known, **values})

    return apply


def module(index: int, **values: Any) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        known = json.loads((folder / "modules.json").read_text())
        known[index].update(values)
        write(folder, "modules.json", known)

    return apply


POOLING, DENSE_CONFIG = "1_Pooling/config.json", "2_Dense/config.json"


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (change(POOLING, pooling_mode_cls_token=True), "must be one: .* not lasttoken and cls_tok"),
        (change(POOLING, pooling_mode_lasttoken=False), "not none"),
        (change(POOLING, pooling_mode="weightedmean"), "pooling_mode='weightedmean'"),
        (change(POOLING, word_embedding_dimension=31), "must be the model's hidden_size=32"),
        (change(POOLING, pooling_mode="mean", include_prompt=False), "include_prompt=False"),
        (change(DENSE_CONFIG, in_features=31), "in_features=31: the vectors before it have 32"),
        (change(DENSE_CONFIG, out_features=47), "linear.weight"),
        (change(DENSE_CONFIG, activation_function="os.system"), "activation_function='os.system'"),
        (change(DENSE_CONFIG, module_input_name="token_embeddings"), "module_input_name"),
        (module(1, type="sentence_transformers.models.CNN"), r"\[1\]\.type=.*CNN"),
        (module(1, type="custom_st.Pooling"), "never run"),
        (
            module(3, type="sentence_transformers.models.Pooling"),
            "Pooling, Dense, Pooling: must be",
        ),
        (module(2, path="../2_Dense"), "leads out"),
        (module(0, path="0_Transformer"), "path='0_Transformer' of Transformer: must be empty"),
        (module(2, path="3_Dense"), "Dense has no config.json"),
        (change("sentence_bert_config.json", do_lower_case=True), "do_lower_case=True"),
        (change("config_sentence_transformers.json", default_prompt_name="x"), "default_prompt"),
        (change("config_sentence_transformers.json", prompts={"a": 1}), "'a' must be a string"),
        (lambda folder: (folder / "2_Dense/model.safetensors").unlink(), "2_Dense"),
        (lambda folder: (folder / "modules.json").write_text("{}") and None, "must hold a list"),
    ],
)
async def test_what_is_unknown_is_refused_by_name(
    checkpoint: Callable[..., Path], spoil: Callable[[Path], None], says: str
) -> None:
    folder = checkpoint("qwen3", {"pooling_mode_lasttoken": True}, 1)
    spoil(folder)
    with pytest.raises(ModelLoadError, match=says):
        async with Engine(folder):
            pass


@pytest.mark.parametrize(
    ("saved", "whole"),
    [
        ("Qwen3Model", "Qwen3ForCausalLM"),
        ("Gemma3TextModel", "Gemma3ForCausalLM"),
        ("GPT2Model", "GPT2LMHeadModel"),
    ],
)
async def test_a_name_without_a_head_is_that_of_its_family(saved: str, whole: str) -> None:
    told = []
    for name in (saved, whole, "Qwen3BidirectionalModel"):
        values = {
            **SHAPE,
            "architectures": [name],
            "n_embd": 32,
            "n_head": 2,
            "n_layer": 1,
            "n_positions": 64,
        }
        with contextlib.suppress(ModelLoadError):
            told.append(parse_config(values))
    assert len(told) == 2
    assert told[0] == told[1]


async def test_a_model_without_modules_has_no_prompts() -> None:
    async with Engine() as engine:
        with pytest.raises(InvalidRequest, match="this model has no prompts"):
            await engine.embed(["a"], prompt_name="query")
