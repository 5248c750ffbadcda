"""What is trained: the sizes of the two models and how each learns."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from transformers import LlamaConfig, LlamaForCausalLM

CONTEXT: Final = 2048
"""Positions the models are trained for."""

VOCABULARY: Final = 4096
"""Tokens in the vocabulary."""


@dataclass(frozen=True)
class Recipe:
    """One model: its dimensions and its share of the training."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    minutes: float
    """Minutes of CPU time, over all threads; by the clock on a GPU."""
    muon_rate: float = 0.02
    adamw_rate: float = 3e-3
    step_tokens: int = 8192
    """Tokens per optimiser step."""
    micro_tokens: int = 4096
    """Tokens per forward pass; as many as keep the activations near the cache."""
    window: int = 512
    """Tokens per row in most steps: short rows are cheaper."""
    long_every: int = 4
    """Each so-many-th step has rows of `CONTEXT` tokens, so that far positions are learnt too."""

    def build(self, vocabulary: int, end_of_text: int) -> LlamaForCausalLM:
        """A newly initialised model, in float32."""
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=vocabulary,
                hidden_size=self.hidden,
                intermediate_size=self.intermediate,
                num_hidden_layers=self.layers,
                num_attention_heads=self.heads,
                num_key_value_heads=self.kv_heads,
                head_dim=64,
                max_position_embeddings=CONTEXT,
                rms_norm_eps=1e-5,
                tie_word_embeddings=True,
                rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
                bos_token_id=end_of_text,
                eos_token_id=end_of_text,
            )
        )


MODEL: Final = Recipe(
    "model", hidden=256, layers=6, heads=4, kv_heads=2, intermediate=640, minutes=84.0
)
DRAFT: Final = Recipe(
    "draft", hidden=128, layers=3, heads=2, kv_heads=1, intermediate=320, minutes=12.0
)


def tiny(recipe: Recipe) -> Recipe:
    """The same shape of work in a few seconds: for the test of the script, not for use."""
    return replace(
        recipe,
        hidden=64,
        layers=2,
        heads=2,
        kv_heads=1,
        intermediate=128,
        step_tokens=1024,
        micro_tokens=512,
        window=128,
    )
