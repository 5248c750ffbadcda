"""The tokenizer of the shipped models: byte-level BPE that knows what indentation costs.

Everything it does is written in `tokenizer.json`; nothing here is needed to use it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

END_OF_TEXT: Final = "<|endoftext|>"
"""Opens every document, and so also ends the one before."""

# A line's end goes together with the indentation of the next line, so that a new line costs one
# token at any depth. A digit stands alone; a word takes the one space before it; what is left is
# runs of signs and runs of blanks.
_PIECES: Final = r"\s*\n[ \t]*| ?[^\W\d]+| ?\d| ?[^\s\w]+|\s+(?!\S)|\s+"

# What people say becomes comments; what the model answered is code and stands as it is.
_CHAT_TEMPLATE: Final = (
    "{{ bos_token }}{% for message in messages %}{% if not loop.first %}{{ '\n' }}{% endif %}"
    "{% if message['role'] == 'assistant' %}{{ message['content'] }}{% else %}"
    "{% for line in message['content'].splitlines() %}{% if not loop.first %}{{ '\n' }}{% endif %}"
    "{{ ('# ' + line).rstrip() }}{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '\n' }}{% endif %}"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learn the merges from `texts`. The same texts give the same tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        max_token_length=32,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{END_OF_TEXT} $A",
        pair=f"{END_OF_TEXT} $A {END_OF_TEXT} $B",
        special_tokens=[(END_OF_TEXT, end_of_text(tokenizer))],
    )
    return tokenizer


def end_of_text(tokenizer: Tokenizer) -> int:
    """The id of `END_OF_TEXT`."""
    index = tokenizer.token_to_id(END_OF_TEXT)
    if index is None:
        raise ValueError(f"the tokenizer has no {END_OF_TEXT} token")
    return index


def write_tokenizer(tokenizer: Tokenizer, folder: Path, context: int) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` the way the hub lays them out."""
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    settings = {
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        "chat_template": _CHAT_TEMPLATE,
    }
    text = json.dumps(settings, indent=2) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
