"""Train the shipped models: `python -m asyncinfer.builtin.training`.

Reads the running Python's own standard library, learns the tokenizer, trains the model and then
the draft, and writes both folders and the card. Uses CUDA where there is some; on two CPU cores it
takes less than an hour. A first checkpoint is there after a minute, and then one every five.

Where other programs want the cores too, start it with `OMP_WAIT_POLICY=PASSIVE` in the environment:
two threads that spin for each other lose more than half of what is left to them. `--resume` goes on
where an earlier run was cut short.

Needs transformers and rich besides what the package itself needs, torch 2.9 or later, and a C++
compiler for the full speed.
"""

from __future__ import annotations

import argparse
import platform
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch
from rich.console import Console
from tokenizers import Tokenizer
from torch import nn
from transformers.utils import logging as transformers_logging

from asyncinfer.builtin.corpus import Corpus, read_corpus, standard_library
from asyncinfer.builtin.paths import MODEL_PATH
from asyncinfer.builtin.training.batches import Packer
from asyncinfer.builtin.training.card import CardFacts, Entry, write_card
from asyncinfer.builtin.training.evaluate import complete, load, measure
from asyncinfer.builtin.training.export import export
from asyncinfer.builtin.training.recipe import DRAFT, MODEL, VOCABULARY, Recipe, tiny
from asyncinfer.builtin.training.trainer import train
from asyncinfer.builtin.training.vocabulary import end_of_text, train_tokenizer

_FUNCTION: Final = "def add(a, b):"
_CLASS: Final = "class Stack:\n    def __init__(self):"


def main(arguments: Sequence[str]) -> None:
    """Run the whole training."""
    options = _parser().parse_args(arguments)
    console = Console()
    transformers_logging.disable_progress_bar()
    recipes = _recipes(options)
    corpus = read_corpus(standard_library(), package="tomllib" if options.tiny else "")
    texts = list(corpus.training.values())
    if options.resume:
        tokenizer = Tokenizer.from_file(str(options.output / MODEL.name / "tokenizer.json"))
    else:
        tokenizer = train_tokenizer(texts, 512 if options.tiny else VOCABULARY)
    encoded = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    documents = [encoding.ids for encoding in encoded]
    facts = CardFacts(
        vocabulary=tokenizer.get_vocab_size(),
        python=platform.python_version(),
        files=len(documents),
        megabytes=sum(len(text.encode()) for text in texts) / 1e6,
        tokens=sum(map(len, documents)),
        held_out=len(corpus.held_out),
        command=" ".join(["python -m asyncinfer.builtin.training", *arguments]),
        seed=options.seed,
        device=_device_name(),
    )
    console.print(facts)
    entries = [_train_one(recipe, documents, corpus, tokenizer, options) for recipe in recipes]
    for entry in entries:
        console.print(entry)
    (options.output / "CARD.md").write_text(write_card(entries, facts), encoding="utf-8")


def _recipes(options: argparse.Namespace) -> list[Recipe]:
    usual = MODEL.minutes + DRAFT.minutes
    wanted = (0.05 if options.tiny else usual) if options.minutes is None else options.minutes
    recipes = [replace(one, minutes=one.minutes * wanted / usual) for one in (MODEL, DRAFT)]
    if options.resume:  # weights that are already annealed want no full peak again
        recipes = [
            replace(one, muon_rate=one.muon_rate / 2, adamw_rate=one.adamw_rate / 2)
            for one in recipes
        ]
    return [tiny(recipe) for recipe in recipes] if options.tiny else recipes


def _device_name() -> str:
    if torch.cuda.is_available():
        return f"on one {torch.cuda.get_device_name()}"
    return f"on {torch.get_num_threads()} CPU threads"


def _move(model: nn.Module, device: str) -> None:
    model.to(device)  # as a plain module: transformers' own override has lost its type


def _train_one(
    recipe: Recipe,
    documents: list[list[int]],
    corpus: Corpus,
    tokenizer: Tokenizer,
    options: argparse.Namespace,
) -> Entry:
    torch.manual_seed(options.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    folder = options.output / recipe.name
    model = recipe.build(tokenizer.get_vocab_size(), end_of_text(tokenizer))
    if options.resume:
        model.load_state_dict(load(folder).state_dict())
    _move(model, device)

    def save() -> None:
        export(model, tokenizer, folder)

    packer = Packer(documents, tokenizer, seed=options.seed)
    compiled = not options.tiny and (device == "cuda" or shutil.which("g++") is not None)
    training = train(model, packer, recipe, compiled=compiled, save=save)
    save()

    shipped = load(folder)
    _move(shipped, device)
    length = 4 if options.tiny else 80
    samples = [
        (how, complete(shipped, tokenizer, prompt, tokens=length, temperature=temperature))
        for how, prompt, temperature in (
            ("greedy", _FUNCTION, 0.0),
            ("temperature 0.7", _FUNCTION, 0.7),
            ("greedy", _CLASS, 0.0),
        )
    ]
    quality = measure(shipped, tokenizer, corpus.held_out.values())
    return Entry(recipe, model.num_parameters(), training, quality, samples)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m asyncinfer.builtin.training",
        description="Train the models shipped with asyncinfer.",
    )
    parser.add_argument(
        "--minutes", type=float, help="CPU minutes for both models together (default: 96)"
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=MODEL_PATH.parent,
        help="where to write model/, draft/ and CARD.md (default: over the shipped ones)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="for the first weights and the order of the text"
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on from the weights in the output folder; give another seed, for another order",
    )
    parser.add_argument(
        "--tiny", action="store_true", help="a few seconds of the same work, to test the script"
    )
    return parser


if __name__ == "__main__":
    main(sys.argv[1:])
