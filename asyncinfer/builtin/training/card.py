"""The model card, written from what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Final

from asyncinfer.builtin.training.evaluate import Quality
from asyncinfer.builtin.training.recipe import CONTEXT, Recipe
from asyncinfer.builtin.training.trainer import Training

_HEAD: Final = """\
# The built-in models

Two small language models that complete Python code, shipped so that everything in this package can
be run, tested and measured on real text without a download. `Engine()` uses the first; the second
is a draft for it, a fifth its size, with the same tokens.

**Architecture.** `LlamaForCausalLM` in bfloat16: rotary positions, RMSNorm, SwiGLU, grouped-query
attention, tied embeddings, {context} positions. Both share one byte-level BPE tokenizer of
{vocabulary} tokens; `<|endoftext|>` opens every document and ends the one before.

**Corpus.** The sources of Python {python}'s standard library, its tests included: {files} files,
{megabytes:.1f} MB, {tokens:,} tokens. Left out are tables of character codes, help texts, files
that do not parse, and {held_out} files that are held out by a hash of their names.

**Licence.** The corpus is under the Python Software Foundation License Version 2, and the models
are given under the same terms.

**Training.** `{command}`, seed {seed}, {device}.
Muon for the layers' matrices, AdamW for the rest; a cosine schedule tied to a budget of CPU time
(by the clock on a GPU); rows of 512 tokens, and of {context} in every fourth step. The seed fixes
the first weights and the order of the text; how many steps fit into the minutes depends on the
machine.
"""

_LIMITS: Final = """\
## Limits

They have read one library and nothing else. They write code that looks like Python, with plausible
names, indentation and brackets; what it computes is often wrong. They cannot follow an instruction:
the chat template turns messages into comments above the code. They may repeat passages of the
standard library, which is under the licence above. They are for running, testing and measuring this
package, and for nothing else.
"""

_COLUMNS: Final = (
    "folder",
    "parameters",
    "hidden",
    "layers",
    "heads (KV)",
    "MLP",
    "tokens seen",
    "steps",
    "core minutes",
    "held-out perplexity",
    "bits per byte",
)


@dataclass(frozen=True)
class Entry:
    """One trained model, for the card."""

    recipe: Recipe
    parameters: int
    training: Training
    quality: Quality
    samples: Sequence[tuple[str, str]]
    """What was asked for, and the text."""


@dataclass(frozen=True)
class CardFacts:
    """What the card's opening says of the run; the corpus is counted without what was held out."""

    vocabulary: int
    python: str
    files: int
    megabytes: float
    tokens: int
    held_out: int
    command: str
    seed: int
    device: str


def write_card(entries: Sequence[Entry], facts: CardFacts) -> str:
    """The card's text, in Markdown."""
    table = [
        "| " + " | ".join(_COLUMNS) + " |",
        "|" + "---|" * len(_COLUMNS),
    ]
    for entry in entries:
        recipe, training, quality = entry.recipe, entry.training, entry.quality
        cells = (
            f"`{recipe.name}/`",
            f"{entry.parameters:,}",
            recipe.hidden,
            recipe.layers,
            f"{recipe.heads} ({recipe.kv_heads})",
            recipe.intermediate,
            f"{training.tokens / 1e6:.1f} M",
            f"{training.steps:,}",
            f"{training.seconds / 60:.1f}",
            f"{quality.perplexity:.3f}",
            f"{quality.bits_per_byte:.3f}",
        )
        table.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    measured = (
        f"Perplexity is per token, over the {entries[0].quality.tokens:,} tokens of the"
        f" held-out files, each read from its beginning\nin pieces of {CONTEXT} tokens, with the"
        " shipped weights computed in float32.\n"
    )
    samples = [
        f"### {entry.recipe.name}, {how}\n\n```python\n{text.rstrip()}\n```\n"
        for entry in entries
        for how, text in entry.samples
    ]
    head = _HEAD.format(context=CONTEXT, **asdict(facts))
    return "\n".join([head, "\n".join(table), "", measured, "## Samples\n", *samples, _LIMITS])
