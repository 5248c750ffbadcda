"""The reference names what transformers has, or it changes no answer."""

from __future__ import annotations

import re
from pathlib import Path

from transformers import GenerationConfig

PAGE = Path(__file__).parents[2] / "docs" / "reference.md"
#: Of the same name and meaning in all, which the page says.
SAME = {"temperature", "top_k", "top_p", "min_p", "repetition_penalty", "num_return_sequences"}
#: What is computed, kept or given beside the answer, and ids of tokens.
BESIDE = re.compile(
    r"_.*|.*_token_id|cache_.*|.*_cache.*|compile_config|continuous_batching_config|output_.*|"
    r"disable_compile|low_memory|prefill_chunk_size|is_assistant|return_dict_in_generate|"
    r"transformers_version|do_sample|max_length|min_length"
)
#: How drafts are made, which one row stands for.
DRAFTS = re.compile(
    r"assistant_.*|num_assistant_.*|max_matching_ngram_size|target_lookbehind|speculation_type"
)


def test_every_option_of_transformers_is_on_the_page() -> None:
    _, _, text = PAGE.read_text("utf-8").partition("### What other engines call it\n")
    table, _, _ = text.partition("\n## ")
    page = set(re.findall(r"`([a-z_*]+)`", table))
    named = {"forced_bos_token_id", "forced_eos_token_id"}
    for option in named | GenerationConfig().to_dict().keys():
        if option not in named and (BESIDE.fullmatch(option) or DRAFTS.fullmatch(option)):
            continue
        assert option in page | SAME, option
