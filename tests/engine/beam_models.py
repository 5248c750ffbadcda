"""Small models for beam searches, of the same numbers in every version of transformers, and what
transformers finds with them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

__all__ = ["CONFIGS", "NEW", "PROMPT", "beam_model", "ends", "group_searches", "theirs"]

PROMPT = [5, 900, 17, 33, 2100, 8, 64]
#: Tokens of the longest answer.
NEW = 9
VOCAB = 4096
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "num_hidden_layers": 2,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
_LLAMA: dict[str, Any] = {
    **_SHAPE,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 2,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {**_SHAPE, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256},
    "qwen3": {**_LLAMA, "head_dim": 128},
    "gemma2": {**_LLAMA, "head_dim": 64, "sliding_window": 24, "query_pre_attn_scalar": 64},
}


def beam_model(family: str) -> Any:
    """A random model whose distribution is neither flat nor certain."""
    config = AutoConfig.for_model(family, **CONFIGS[family])
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model = model.float().eval()
    # The legacy generator's numbers are frozen.
    random = np.random.RandomState(7)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            values = torch.from_numpy(random.standard_normal(tuple(parameter.shape)))
            norm = name.endswith("weight") and ("norm" in name or ".ln_" in name)
            # Gemma adds one to its norms' weights itself.
            parameter.copy_(0.15 * values + float(norm and family != "gemma2"))
        spread = model(torch.tensor([PROMPT])).logits[0, -1].std()
        model.get_output_embeddings().weight *= 2.5 / spread
    return model


def ends(model: Any) -> tuple[int, int]:
    """A token at which answers end, though not all of them and not at once, and one at which most
    of them do."""
    found = Counter(t for tokens, _ in theirs(model, 4, 0) for t in tokens[2:]).most_common(3)
    often = Counter(t for tokens, _ in theirs(model, 8, 0) for t in tokens[1:]).most_common(1)
    return found[-1][0], often[0][0]


def theirs(model: Any, beams: int, eos: int, **options: Any) -> list[tuple[tuple[int, ...], float]]:
    """Transformers' answers to `PROMPT` and their scores, the best first."""
    with torch.inference_mode():
        out = model.generate(
            torch.tensor([PROMPT]),
            attention_mask=torch.ones(1, len(PROMPT), dtype=torch.long),
            num_beams=beams,
            num_return_sequences=beams,
            do_sample=False,
            max_new_tokens=NEW,
            eos_token_id=eos,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
            **options,
        )
    scores = out.sequences_scores.tolist() if beams > 1 else [0.0]
    answers = (
        tuple(row[: row.index(eos) + 1] if eos in row else row)
        for row in out.sequences[:, len(PROMPT) :].tolist()
    )
    return [*zip(answers, scores, strict=True)]


def group_searches() -> Iterator[dict[str, Any]]:
    """Options of a search with groups: every number of beams up to 8, every number of groups."""
    for beams in range(2, 9):
        for groups in range(2, beams + 1):
            if beams % groups == 0:
                for penalty in (0.4, 2.0):
                    yield {"beams": beams, "groups": groups, "diversity_penalty": penalty}
    some = {"beams": 6, "groups": 2, "diversity_penalty": 0.7}
    yield {**some, "length_penalty": 0.0}
    yield {**some, "length_penalty": 2.0, "early_stopping": "never"}
    yield {**some, "length_penalty": -1.0, "early_stopping": True}
    yield {**some, "length_penalty": 1.0, "early_stopping": True}
