"""Models in GGUF files: logits equal to those of the model they were made from."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from fuzzing import fuzz
from hypothesis import given
from hypothesis import strategies as st
from models.checkpoints import Sequences, expected
from models.families import CASES, random_model
from models.gguf_files import ARCHITECTURES, write_gguf

from asyncinfer.errors import ModelLoadError
from asyncinfer.models import load_model, tensor_table
from asyncinfer.models.gguf import gguf_config
from asyncinfer.weights.gguf import GgufCheckpoint

#: What is taken for granted of some families, in the place of what a case has.
GRANTED = {
    "gemma2": {"query_pre_attn_scalar": 256},
    "gemma3_text": {"query_pre_attn_scalar": 64},
    "qwen3_moe": {"norm_topk_prob": True},
}
#: What a file has no words for, or llama.cpp takes for granted.
UNSAID = {
    ("gemma2", "caps"): "biases of Gemma's attention, another scale",
    ("gemma2", "no caps, untied"): "Gemma 2 without caps",
    ("gemma3_text", "listed"): "which layers have windows",
    ("gemma3_text", "scaled"): "which layers have windows",
    ("gpt2", "unscaled"): "attention without a scale",
    ("gpt_oss", "listed, unscaled"): "which layers have windows, another limit",
    ("mixtral", "window, one of three"): "a window of every layer",
    ("phi", "all rotated"): "another activation",
    ("qwen2", "window above"): "which layers have windows",
    ("qwen3", "bias and windows"): "which layers have windows",
    ("qwen3_moe", "some layers, normalised"): "which layers have experts",
    ("qwen3_moe", "windows"): "which layers have windows",
    ("smollm3", "every other"): "another interval of layers without rotation",
    ("smollm3", "listed, untied, windows"): "which layers are rotated",
}
SAID = [case for case in CASES if case[0] in ARCHITECTURES and case not in UNSAID]


@pytest.mark.parametrize("case", SAID, ids=lambda case: f"{case[0]}-{case[1]}".replace(" ", "-"))
def test_logits(case: tuple[str, str], tmp_path: Path) -> None:
    model = random_model(*case, **GRANTED.get(case[0], {}))
    decoder = load_model(
        write_gguf(model, tmp_path / "model.gguf"), "cpu", torch.float32, max_context=256
    )
    ids = [torch.randint(0, 199, (70,), generator=torch.Generator().manual_seed(3))]
    sequences = Sequences(decoder, ids)
    sequences.step(s0=50)
    for _ in range(20):
        sequences.step(s0=1)
    torch.testing.assert_close(sequences.logits[0], expected(model, ids[0]), rtol=0.0, atol=1e-4)


class Header:
    """What `gguf_config` looks at of a file, with metadata of one's own."""

    def __init__(self, checkpoint: GgufCheckpoint, metadata: dict[str, Any]) -> None:
        self.folder = checkpoint.folder
        self.tensors = checkpoint.tensors
        self.reader = checkpoint.reader
        self.metadata = metadata


ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from((-1, 0, 1, 3, 2**31, 2**63, 2**64 - 1, "", "x", 0.0, -1.5, math.nan, math.inf)),
    st.lists(st.integers(-3, 3), max_size=4).map(lambda values: np.array(values, np.int32)),
    st.lists(st.text(max_size=2), max_size=2),
)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[GgufCheckpoint]]:
    families = ("llama", "phi3", "gemma3_text", "mixtral", "gpt_oss", "gpt2")
    cases = [next(case for case in CASES if case[0] == family) for family in families]
    cases += [("llama", "tied, llama3"), ("phi3", "longrope")]
    folder = tmp_path_factory.mktemp("gguf")
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(
                GgufCheckpoint(write_gguf(random_model(*case), folder / f"{index}.gguf"))
            )
            for index, case in enumerate(cases)
        ]


def test_a_list_in_the_place_of_a_number(files: list[GgufCheckpoint]) -> None:
    gemma = files[2]
    metadata = {**gemma.metadata, "gemma3.block_count": np.array([3, 4], np.int32)}
    with pytest.raises(ModelLoadError, match="num_hidden_layers"):
        gguf_config(cast(GgufCheckpoint, Header(gemma, metadata)))


@fuzz(200)
@given(data=st.data())
def test_fuzzed_metadata(files: list[GgufCheckpoint], data: st.DataObject) -> None:
    """Whatever the values of a file are: a config, or a `ModelLoadError`."""
    checkpoint = data.draw(st.sampled_from(files))
    metadata = dict(checkpoint.metadata)
    keys = sorted(key for key in metadata if not key.startswith("tokenizer.ggml.t"))
    for key in data.draw(st.lists(st.sampled_from(keys), min_size=1, max_size=3)):
        metadata[key] = data.draw(ODD)
    name = data.draw(st.sampled_from(("rope.scaling.type", "rope.scaling.factor", "expert_count")))
    if data.draw(st.booleans()):
        metadata[f"{metadata.get('general.architecture')}.{name}"] = data.draw(ODD)
    with contextlib.suppress(ModelLoadError):
        config = gguf_config(cast(GgufCheckpoint, Header(checkpoint, metadata)))
        tensor_table(config)
