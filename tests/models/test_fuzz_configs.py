"""config.json of every family with hostile values: read, or refused with the file and the key; and
every shape that is taken makes a decoder that runs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from fuzzing import FACTOR, fuzz
from hypothesis import given
from hypothesis import strategies as st
from models.families import FAMILIES, causal_class, config_of
from models.hostile_json import VALUES, changed
from models.published import CONFIGS

from asyncinfer.errors import ModelLoadError
from asyncinfer.files import CONFIG_JSON
from asyncinfer.layers import ACTIVATIONS, NormKind
from asyncinfer.models import (
    Decoder,
    ExpertsConfig,
    LayerConfig,
    ModelConfig,
    RopeConfig,
    TensorNames,
    parse_config,
    read_config,
    tensor_table,
)
from asyncinfer.models.parts import Block, QKNorm
from asyncinfer.testing.decoder_run import DecoderRun


def small(family: str, kind: str) -> dict[str, Any]:
    config = config_of(family, kind)
    architecture = causal_class(config).__name__
    return {**json.loads(config.to_json_string(use_diff=False)), "architectures": [architecture]}


BASES = [
    *(small(family, kind) for family, kinds in FAMILIES.items() for kind in kinds),
    *CONFIGS.values(),
]
#: Keys that some of them have.
MORE = (
    *("head_dim", "rope_scaling", "rope_parameters", "partial_rotary_factor", "sliding_window"),
    *("layer_types", "quantization_config", "auto_map", "text_config", "num_key_value_heads"),
    *("rope_theta", "original_max_position_embeddings", "use_sliding_window", "torch_dtype"),
    *("short_factor", "long_factor", "factor", "rope_type", "type", "mscale", "mscale_all_dim"),
    *("beta_fast", "beta_slow", "attention_factor", "truncate", "low_freq_factor"),
    *("quant_method", "weight_block_size", "modules_to_not_convert", "config_groups"),
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzzed") / "config.json"


def taken(read: Callable[[Any], ModelConfig], source: Any) -> ModelConfig | ModelLoadError:
    """What comes of a folder, or of what its file holds."""
    try:
        return read(source)
    except ModelLoadError as error:
        return error


def check(came: ModelConfig | ModelLoadError, file: str) -> None:
    """A refusal names the file and a key: none is what happened to go wrong behind the checks."""
    if isinstance(came, ModelConfig):
        experts = came.experts.count if came.experts is not None else 1
        if came.num_layers * experts < 5_000:
            assert len(tensor_table(came)) > came.num_layers
        return
    said = str(came)
    assert came.file == file
    assert len(said) < 3_000
    assert re.search(
        r": [\w.]+=|cannot be read as JSON|must hold a JSON object|is a pointer of Git LFS", said
    ), said
    assert not re.search(r"cannot be read as (?!JSON)", said), said


@fuzz(400)
@given(data=st.data())
def test_fuzz_a_config(path: Path, data: st.DataObject) -> None:  # fault 45
    values = data.draw(st.sampled_from(BASES).flatmap(lambda base: changed(base, MORE)))
    path.write_text(json.dumps(values), "utf-8")
    check(taken(read_config, path.parent), str(path))


@pytest.mark.parametrize("family", FAMILIES)
def test_fuzz_each_key(family: str) -> None:  # fault 45
    """One value at a time, none left out: no drawing finds them all. Every eighth value here, all
    of them where more is asked for."""
    base = small(family, next(iter(FAMILIES[family])))
    seen: list[ModelConfig | ModelLoadError] = []
    for outer in (None, *(key for key, value in base.items() if isinstance(value, dict))):
        holder = base if outer is None else base[outer]
        for number, key in enumerate(holder):
            for value in VALUES if FACTOR > 1 else VALUES[number % 8 :: 8]:
                inner = {**holder, key: value}
                came = taken(parse_config, inner if outer is None else {**base, outer: inner})
                # Most values change nothing: a family does not read them.
                if came not in seen:
                    check(came, CONFIG_JSON)
                    seen.append(came)


@fuzz(150)
@given(content=st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
def test_fuzz_bytes(path: Path, content: bytes) -> None:  # fault 45
    path.write_bytes(content)
    came = taken(read_config, path.parent)
    assert isinstance(came, ModelLoadError)
    check(came, str(path))


def maybe(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | strategy


def ropes() -> st.SearchStrategy[RopeConfig]:
    return st.builds(
        RopeConfig,
        rope_type=st.sampled_from(["default", "linear", "llama3", "yarn"]),
        size=maybe(st.sampled_from([2, 4, 8])),
        interleaved=st.booleans(),
        theta=st.sampled_from([1.1, 10_000.0]),
        factor=st.sampled_from([1.0, 8.0]),
        original_context=st.just(16),
        attention_factor=st.sampled_from([1.0, 1.2]),
        truncate=st.booleans(),
    )


def layers() -> st.SearchStrategy[LayerConfig]:
    window = maybe(st.sampled_from([1, 5, 16, 200]))
    block = maybe(st.sampled_from(get_args(Block)))
    return st.builds(
        LayerConfig, rope=maybe(ropes()), block=block, window=window, experts=st.booleans()
    )


def mixtures() -> st.SearchStrategy[ExpertsConfig]:
    return st.builds(
        ExpertsConfig,
        count=st.just(4),
        active=st.integers(1, 4),
        intermediate_size=st.sampled_from([8, 24]),
        normalise=st.booleans(),
        router_bias=st.booleans(),
        bias=st.booleans(),
        scoring=st.sampled_from(["softmax", "sigmoid", "sparse-mixer"]),
        correction=st.booleans(),
        scale=st.sampled_from([1.0, 2.5]),
        shared_size=st.sampled_from([0, 8]),
        shared_gate=st.booleans(),
        clamped_swiglu=maybe(st.just((1.7, 7.0))),
    )


NAMES = (
    TensorNames(),
    TensorNames(qkv=("qkv",), up=("up",)),
    TensorNames(qkv=("qkv",), up=("up",), transposed=True),
    TensorNames(qkv=("qkv",), up=("up",), shared_up=("up2",), transposed=True),
    TensorNames(qkv=("qkv",), qkv_by_head=True),
    TensorNames(expert_up=("up",), expert_down="down", expert_up_alternates=True),
    TensorNames(expert_up=("up",), expert_down="down", expert_outputs_first=True),
)


@st.composite
def shapes(draw: st.DrawFn) -> ModelConfig | None:
    """A shape that is taken; None for one that is refused as a ValueError."""
    count = draw(st.integers(1, 2))
    flags = ("norm_weight", "norm_bias", "gated_mlp", "tied_head", "qkv_bias", "out_bias")
    flags += ("mlp_bias", "head_bias", "sinks")
    try:
        return ModelConfig(
            architecture="Fuzzed",
            vocab_size=67,
            hidden_size=draw(st.sampled_from([16, 24])),
            intermediate_size=draw(st.sampled_from([16, 40])),
            num_layers=count,
            num_heads=draw(st.sampled_from([2, 4])),
            num_kv_heads=draw(st.sampled_from([1, 2, 4])),
            head_dim=draw(st.sampled_from([7, 8, 16])),
            max_context=128,
            block=draw(st.sampled_from(get_args(Block))),
            norm=draw(st.sampled_from(get_args(NormKind))),
            qk_norm=draw(maybe(st.sampled_from(get_args(QKNorm)))),
            rope=draw(maybe(ropes())),
            layers=draw(st.just(()) | st.tuples(*[layers()] * count)),
            learned_positions=draw(maybe(st.just(128))),
            activation=draw(st.sampled_from([*ACTIVATIONS, torch.tanh])),
            experts=draw(maybe(mixtures())),
            attention_scale=draw(maybe(st.just(0.2))),
            attention_softcap=draw(maybe(st.just(5.0))),
            logit_softcap=draw(maybe(st.just(5.0))),
            embedding_scale=draw(st.sampled_from([1.0, 3.0])),
            residual_scale=draw(st.sampled_from([1.0, 0.5])),
            logit_scale=draw(st.sampled_from([1.0, 0.5])),
            names=draw(st.sampled_from(NAMES)),
            **{flag: draw(st.booleans()) for flag in flags},
        )
    except ValueError:
        return None


@fuzz(300)
@given(config=shapes())
def test_fuzz_a_shape_that_is_taken_runs(config: ModelConfig | None) -> None:
    """What the checks let pass makes a table, a decoder, and the same logits in one step as in
    several."""
    if config is None:
        return
    table = tensor_table(config)
    numbers = torch.Generator().manual_seed(1)
    weights = {
        name: torch.randn(packed.shape, generator=numbers) * 0.3 for name, packed in table.items()
    }
    decoder = Decoder(config, weights.__getitem__)
    ids = torch.randint(0, 67, (21,), generator=numbers).tolist()
    whole, parts = DecoderRun(decoder, [ids]), DecoderRun(decoder, [ids])
    whole.step({0: 21})
    for step in (9, 1, 1, 10):
        parts.step({0: step})
    assert whole.logits[0].isfinite().all()
    torch.testing.assert_close(whole.logits[0], parts.logits[0], rtol=1e-3, atol=1e-3)
    if config.rope is not None and not config.layers:
        # Rows that are put apart are as many as before.
        other = replace(config, rope=replace(config.rope, interleaved=not config.rope.interleaved))
        assert tensor_table(other) == table
