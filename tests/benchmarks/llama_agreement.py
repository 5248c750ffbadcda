"""Greedy answers of a GGUF file beside llama.cpp's on the same file, as a record:

python -m benchmarks.llama_agreement model.gguf docs/benchmarks/llama-agreement-NAME.json

llama.cpp rounds activations to 8 bits before it multiplies them by quantised weights, so that its
logits differ from those of the file's numbers. Where two tokens are nearly as likely as each other
it may choose the other one, and what follows is another text. So its own answer is also given to
this engine token by token: wherever this engine would have chosen another token, the record has the
difference of the two logprobs, here and in llama.cpp. The same is done with the file's numbers
written out as float32, for which llama.cpp rounds nothing.
"""

from __future__ import annotations

import asyncio
import math
import statistics
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import gguf
import numpy as np

from asyncinfer import Engine
from asyncinfer.bench import Figure, Record
from asyncinfer.bench.peers.llama_cpp import LlamaPeer
from asyncinfer.cli.bench_run import print_record
from asyncinfer.text import gguf_template, gguf_tokenizer
from asyncinfer.weights.gguf import read_header

__all__ = ["Agreement", "Difference", "compare", "record"]

PROMPTS: Final = (
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain in two sentences why the sky is blue.",
    "Translate to Spanish: The library opens at nine.",
    "List five fruits and their colours.",
    "def fibonacci(n):",
    "Who wrote Pride and Prejudice, and when?",
    "What is 17 + 25? Answer with the number.",
    "Once upon a time, in a village by the river,",
    "Give three reasons to learn Python \u2014 na\u00efve or not \u2014 in 2024.",
)
TOKENS: Final = 64
#: Tokens of a prompt and its answer, at most.
CONTEXT: Final = 256
#: A near-tie: one token is less than one and a half times as likely as the other. In nats.
NEAR: Final = math.log(1.5)


@dataclass(frozen=True, slots=True)
class Difference:
    """A position of llama.cpp's answer at which this engine would have chosen another token."""

    prompt: int
    position: int
    ours: str
    theirs: str
    #: The logprob of our token less that of llama.cpp's, here.
    here: float
    #: The logprob of llama.cpp's token less that of ours, in llama.cpp.
    there: float


@dataclass(frozen=True, slots=True)
class Agreement:
    """What was seen of one file."""

    file: str
    prompts: int
    #: Prompts whose token ids are llama.cpp's.
    tokenised_alike: int
    #: Prompts whose 64 greedy tokens are all llama.cpp's.
    answered_alike: int
    #: Tokens of llama.cpp's answers, all and those that this engine ranks first.
    tokens: int
    tokens_alike: int
    #: Root of the mean square of the difference between the logprobs of llama.cpp's tokens.
    logprob_rms: float
    differences: tuple[Difference, ...]

    def figures(self) -> tuple[Figure, ...]:
        name = self.file
        most = max((found.here for found in self.differences), default=0.0)
        return (
            Figure(
                f"{name}: prompts tokenised alike", self.tokenised_alike, "", "higher", self.prompts
            ),
            Figure(f"{name}: answered alike", self.answered_alike, "prompts", "higher"),
            Figure(f"{name}: tokens alike", self.tokens_alike, f"of {self.tokens}", "higher"),
            Figure(f"{name}: largest difference at another token", most, "nats", "lower", NEAR),
            Figure(f"{name}: difference of logprobs, rms", self.logprob_rms, "nats", "lower"),
        )


async def compare(
    path: Path,
    peer: LlamaPeer,
    name: str,
    prompts: Sequence[str] = PROMPTS,
    tokens: int = TOKENS,
) -> Agreement:
    """Answer every prompt in both engines, as the user's message where the file has a template."""
    metadata = read_header(path).metadata
    tokenizer = gguf_tokenizer(metadata, str(path))
    template = gguf_template(metadata, str(path), tokenizer.shield)
    differences: list[Difference] = []
    errors: list[float] = []
    same_ids = same_answers = 0
    async with Engine(path, device="cpu", dtype="float32", max_context=CONTEXT) as engine:
        for number, text in enumerate(prompts):
            if template:
                text = template.render([{"role": "user", "content": text}])
                ids = tokenizer.encode_chat(text)
            else:
                ids = tokenizer.encode(text)
            bare = ids[1:] if ids[0] == tokenizer.bos_id and not template else ids
            same_ids += bare == peer.tokenize(text)
            theirs = peer.generate([ids], tokens)[0]
            ours = await engine.generate(ids, max_tokens=tokens, temperature=0.0, ignore_eos=True)
            same_answers += list(ours.token_ids) == theirs
            read = await engine.generate([*ids, *theirs], max_tokens=1, prompt_logprobs=2)
            assert read.prompt_logprobs is not None
            logits = peer.logits([*ids, *theirs])[len(ids) - 1 : -1].astype(np.float64)
            logprobs = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
            for position, entry in enumerate(read.prompt_logprobs[len(ids) :]):
                assert entry is not None
                there = logprobs[position]
                errors.append(entry.logprob - float(there[entry.token_id]))
                if entry.rank == 1:
                    continue
                first, best = entry.top[0]
                differences.append(
                    Difference(
                        number,
                        position,
                        tokenizer.decode([first], skip_special_tokens=False),
                        tokenizer.decode([entry.token_id], skip_special_tokens=False),
                        best - entry.logprob,
                        float(there[entry.token_id] - there[first]),
                    )
                )
    return Agreement(
        name,
        len(prompts),
        same_ids,
        same_answers,
        len(errors),
        len(errors) - len(differences),
        statistics.fmean(error * error for error in errors) ** 0.5,
        tuple(differences),
    )


def write_floats(path: Path, target: Path) -> None:
    """Write a GGUF file with the numbers of another, all of them float32."""
    reader = gguf.GGUFReader(path)
    fields = reader.fields
    writer = gguf.GGUFWriter(target, fields["general.architecture"].contents())
    for name, field in fields.items():
        if not name.startswith(("GGUF.", "general.architecture")):
            item = field.types[-1] if field.types[0] is gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], item)
    for tensor in reader.tensors:
        floats = gguf.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, floats.reshape(tensor.shape[::-1]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def record(path: Path, threads: int = 2) -> Record:
    """Compare everything; llama-cpp-python must be installed."""
    with TemporaryDirectory() as folder:
        floats = Path(folder, "floats.gguf")
        write_floats(path, floats)
        found = []
        for name, file in (("the file", path), ("its numbers as float32", floats)):
            with closing(LlamaPeer(file, threads=threads, context=CONTEXT, requests=1)) as peer:
                found.append(asyncio.run(compare(file, peer, name)))
    return Record(
        benchmark="llama-agreement",
        options={"model": path.name, "prompts": list(PROMPTS), "tokens": TOKENS},
        figures=tuple(figure for one in found for figure in one.figures()),
        detail={"rows": [asdict(one) for one in found]},
    )


if __name__ == "__main__":
    made = record(Path(sys.argv[1]))
    made.save(Path(sys.argv[2]))
    print_record(made)
