"""Every family's logits equal to transformers' within 1e-4 in float32, however the tokens are cut
into steps: prefill, decode, chunks, a shared prefix, and well past every window."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from models.checkpoints import Sequences, expected
from models.families import CASES, FAMILIES, random_model
from transformers import PreTrainedModel

from asyncinfer.models import (
    Decoder,
    ExpertsConfig,
    LayerConfig,
    ModelConfig,
    load_model,
    tensor_table,
)
from asyncinfer.weights import SafetensorsCheckpoint, WeightLoader

TOLERANCE = {"rtol": 0.0, "atol": 1e-4}


def saved(model: PreTrainedModel, folder: Path) -> Path:
    """As transformers itself writes checkpoints."""
    model.save_pretrained(folder)
    return folder


Pair = tuple[PreTrainedModel, Decoder, Path]


@pytest.fixture(
    scope="module",
    params=CASES,
    ids=lambda case: f"{case[0]}-{case[1]}".replace(" ", "-"),
)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A model, a decoder of it and its checkpoint; no test changes them."""
    model = random_model(*request.param)
    folder = saved(model, tmp_path_factory.mktemp("checkpoint"))
    return model, load_model(folder, "cpu", torch.float32, max_context=256), folder


def tokens(*lengths: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, 199, (length,), generator=generator) for length in lengths]


def test_logits(pair: Pair) -> None:
    model, decoder, _ = pair
    ids = tokens(150, 33, 16, 47)
    ids[3][:32] = ids[0][:32]
    right = [expected(model, sequence) for sequence in ids]
    assert right[0].std() > 0.3

    whole = Sequences(decoder, ids)
    whole.step(s0=150, s1=33, s2=16, s3=47)

    mixed = Sequences(decoder, ids)
    mixed.step(s0=15, s2=15)
    mixed.step(s0=1, s2=1, s1=32)
    mixed.step(s0=17, s1=1)
    mixed.share(3, 0, 32)
    for _ in range(15):
        mixed.step(s0=1, s3=1)
    mixed.step(s0=102)
    assert whole.done == mixed.done == [150, 33, 16, 47]
    for got, right_one in zip(whole.logits, right, strict=True):
        torch.testing.assert_close(got, right_one, **TOLERANCE)
    for got, right_one, hit in zip(mixed.logits, right, (0, 0, 0, 32), strict=True):
        torch.testing.assert_close(got[hit:], right_one[hit:], **TOLERANCE)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_bfloat16_is_near(family: str, tmp_path: Path) -> None:
    model = random_model(family, next(iter(FAMILIES[family])))
    decoder = load_model(saved(model, tmp_path), "cpu", torch.bfloat16, max_context=256)
    (ids,) = tokens(60)
    run = Sequences(decoder, [ids])
    run.step(s0=40)
    for _ in range(20):
        run.step(s0=1)
    right = expected(model, ids)
    # Experts are chosen by small margins: a token may get others than in float32.
    bound = 0.4 if decoder.config.experts is not None else 0.06
    assert (run.logits[0] - right).norm() / right.norm() < bound


#: What a config may set back to Llama's without another set of tensors.
RULES = (
    "layers",
    "activation",
    "attention_scale",
    "attention_softcap",
    "embedding_scale",
    "residual_scale",
    "logit_scale",
    "logit_softcap",
)


def test_every_difference_shows(pair: Pair) -> None:
    """Else the comparison above would prove nothing of it."""
    _, decoder, folder = pair
    (ids,) = tokens(60)

    def logits(config: ModelConfig) -> torch.Tensor:
        with SafetensorsCheckpoint(folder) as checkpoint, torch.inference_mode():
            table = tensor_table(config)
            loader = WeightLoader(checkpoint, table, torch.device("cpu"), torch.float32, None)
            changed = Decoder(config, loader, 256)
        run = Sequences(changed, [ids])
        run.step(s0=60)
        return run.logits[0]

    ours = decoder.config
    right = logits(ours)
    plain = {field.name: field.default for field in fields(ModelConfig)}
    others = {rule: plain[rule] for rule in RULES if getattr(ours, rule) != plain[rule]}
    if not all(layer.experts for layer in ours.layers):
        del others["layers"]
    if ours.latent is not None:
        # None stands for the scale that it states, unless YaRN multiplies it.
        del others["attention_scale"]
    changed = [replace(ours, **{rule: value}) for rule, value in others.items()]
    if ours.experts is not None:
        changed += [replace(ours, experts=other) for other in other_experts(ours.experts)]
    if ours.latent is not None:
        other = replace(ours.latent, interleaved=not ours.latent.interleaved)
        changed.append(replace(ours, latent=other))
        changed.append(replace(ours, attention_scale=2 * ours.query_scale))
    if ours.qk_norm == "rotated-head":
        changed.append(replace(ours, qk_norm="head"))
    if ours.norm.endswith("-plus-one"):
        changed.append(replace(ours, norm=ours.norm.removesuffix("-plus-one")))
    if ours.block == "parallel":
        changed.append(replace(ours, block="pre"))
    if ours.rope is not None and not ours.layers and ours.latent is None:
        changed.append(replace(ours, rope=None))
        if ours.rope.size is not None:
            changed.append(replace(ours, rope=replace(ours.rope, size=None, rope_type="default")))
    for layer, config in enumerate(ours.layers):
        ropes = {ours.rope, config.rope} if ours.latent else {None, ours.rope, config.rope}
        for rope in ropes - {config.rope}:
            other = replace(config, rope=rope)
            changed.append(replace(ours, layers=with_layer(ours.layers, layer, other)))
        if config.temperature is not None:
            other = replace(config, temperature=None)
            changed.append(replace(ours, layers=with_layer(ours.layers, layer, other)))
        if config.window is not None:
            other = replace(config, window=config.window + 1)
            changed.append(replace(ours, layers=with_layer(ours.layers, layer, other)))
    assert changed
    for config in changed:
        assert (logits(config) - right).abs().max() > 1e-3, config


def with_layer(
    layers: tuple[LayerConfig, ...], index: int, layer: LayerConfig
) -> tuple[LayerConfig, ...]:
    return (*layers[:index], layer, *layers[index + 1 :])


def other_experts(experts: ExpertsConfig) -> list[ExpertsConfig]:
    if experts.scoring == "sparse-mixer":
        return [replace(experts, scoring="softmax"), replace(experts, jitter=1.0)]
    others = []
    if 1 < experts.active < experts.count:
        others.append(replace(experts, normalise=not experts.normalise))
    if experts.shared_gate:
        others.append(replace(experts, shared_gate=False))
    if experts.correction:
        others.append(replace(experts, correction=False))
    if experts.scale != 1.0:
        others.append(replace(experts, scale=1.0))
    if experts.groups > 1:
        others.append(replace(experts, group_best=3 - experts.group_best))
        others.append(replace(experts, groups=1, active_groups=1))
    if experts.scoring == "sigmoid":
        others.append(replace(experts, scoring="softmax"))
    if experts.clamped_swiglu is not None:
        alpha, limit = experts.clamped_swiglu
        others += [replace(experts, clamped_swiglu=rule) for rule in (None, (alpha / 2, limit))]
        if limit < 1:
            others.append(replace(experts, clamped_swiglu=(alpha, 2 * limit)))
    return others
