"""The tensors of layers that keep a state, and how checkpoints store them."""

from __future__ import annotations

from collections.abc import Iterator

from asyncinfer.models.config import ModelConfig
from asyncinfer.models.parts import (
    GatedDeltaConfig,
    KimiDeltaConfig,
    MambaConfig,
    MixerConfig,
    ShortConvConfig,
)
from asyncinfer.models.tensor_parts import linear_tensors, one_tensor
from asyncinfer.weights import Packed, Piece

__all__ = ["mixer_tensors"]


def mixer_tensors(
    config: ModelConfig, mixer: MixerConfig, stored: str
) -> Iterator[tuple[str, Packed]]:
    """The tensors of a layer with this mixer, whose names begin with `stored` in the checkpoint."""
    if isinstance(mixer, GatedDeltaConfig):
        return _delta(config, mixer, stored)
    if isinstance(mixer, KimiDeltaConfig):
        return _kimi(config, mixer, stored)
    if isinstance(mixer, MambaConfig):
        return _mamba(config, mixer, stored)
    return _convolution(config, mixer, stored)


def _convolution(
    config: ModelConfig, mixer: ShortConvConfig, stored: str
) -> Iterator[tuple[str, Packed]]:
    names, hidden, bias = config.names, config.hidden_size, mixer.bias
    yield from linear_tensors(
        config, stored, "mixer.in", (names.conv_in,), (3 * hidden,), hidden, bias
    )
    yield "mixer.conv.weight", one_tensor(f"{stored}{names.conv}.weight", hidden, 1, mixer.width)
    if bias:
        yield "mixer.conv.bias", one_tensor(f"{stored}{names.conv}.bias", hidden)
    yield from linear_tensors(
        config, stored, "mixer.out", (names.conv_out,), (hidden,), hidden, bias
    )


def _delta(
    config: ModelConfig, mixer: GatedDeltaConfig, stored: str
) -> Iterator[tuple[str, Packed]]:
    names, hidden, inner = config.names, config.hidden_size, mixer.heads * mixer.value_dim
    keys = mixer.key_heads * mixer.key_dim
    apart = (keys, keys, inner)
    sizes = (*apart, inner) if len(names.delta_in) == 4 else (mixer.channels, inner)
    yield from linear_tensors(config, stored, "mixer.in", names.delta_in, sizes, hidden, False)
    gates = names.delta_gates, (mixer.heads, mixer.heads), hidden, False
    yield from linear_tensors(config, stored, "mixer.gates", *gates)
    rows = names.delta_conv_rows or (apart if len(names.delta_conv) == 3 else (mixer.channels,))
    conv = zip(names.delta_conv, rows, strict=True)
    pieces = (Piece(f"{stored}{part}.weight", (n, 1, mixer.width)) for part, n in conv)
    yield "mixer.conv.weight", Packed(tuple(pieces))
    for part, name in (("rate", names.delta_rate), ("bias", names.delta_bias)):
        # float32, since an error in the rate of decay grows with the number of tokens.
        yield f"mixer.{part}", Packed(one_tensor(stored + name, mixer.heads).pieces, "float32")
    yield "mixer.norm", one_tensor(f"{stored}{names.delta_norm}.weight", mixer.value_dim)
    yield from linear_tensors(
        config, stored, "mixer.out", (names.delta_out,), (hidden,), inner, False
    )


def _kimi(config: ModelConfig, mixer: KimiDeltaConfig, stored: str) -> Iterator[tuple[str, Packed]]:
    names, hidden, size, inner = config.names, config.hidden_size, mixer.head_dim, mixer.inner
    small = (names.kimi_forget[0], names.kimi_gate[0], names.kimi_beta)
    inputs = (*names.qkv, *small), (*[inner] * 3, size, size, mixer.heads), hidden, False
    yield from linear_tensors(config, stored, "mixer.in", *inputs)
    for part, name in (("forget", names.kimi_forget[1]), ("gate", names.kimi_gate[1])):
        yield from linear_tensors(config, stored, f"mixer.{part}", (name,), (inner,), size, False)
    pieces = (Piece(f"{stored}{part}.weight", (inner, 1, mixer.width)) for part in names.delta_conv)
    yield "mixer.conv.weight", Packed(tuple(pieces))
    # float32, since an error in the rate of decay grows with the number of tokens.
    rate, bias = (stored + name for name in (names.delta_rate, names.delta_bias))
    shape = (mixer.heads,) if names.plain_rates else (1, 1, mixer.heads, 1)
    yield "mixer.rate", Packed(one_tensor(rate, *shape).pieces, "float32")
    yield "mixer.bias", Packed(one_tensor(bias, inner).pieces, "float32")
    yield "mixer.norm", one_tensor(f"{stored}{names.delta_norm}.weight", size)
    out = (names.delta_out,), (hidden,), inner, False
    yield from linear_tensors(config, stored, "mixer.out", *out)


def _mamba(config: ModelConfig, mixer: MambaConfig, stored: str) -> Iterator[tuple[str, Packed]]:
    names, hidden, inner, channels = config.names, config.hidden_size, mixer.inner, mixer.channels
    inputs = (names.mamba_in,), (inner + channels + mixer.heads,), hidden, mixer.in_bias
    yield from linear_tensors(config, stored, "mixer.in", *inputs)
    yield (
        "mixer.conv.weight",
        one_tensor(f"{stored}{names.mamba_conv}.weight", channels, 1, mixer.width),
    )
    if mixer.conv_bias:
        yield "mixer.conv.bias", one_tensor(f"{stored}{names.mamba_conv}.bias", channels)
    for part in ("rate", "bias", "skip"):
        name = getattr(names, f"mamba_{part}")
        # float32, since an error in the rate of decay grows with the number of tokens.
        yield f"mixer.{part}", Packed(one_tensor(stored + name, mixer.heads).pieces, "float32")
    if mixer.norm is not None:
        yield "mixer.norm", one_tensor(f"{stored}{names.mamba_norm}.weight", inner)
    out = (names.mamba_out,), (hidden,), inner, mixer.out_bias
    yield from linear_tensors(config, stored, "mixer.out", *out)
