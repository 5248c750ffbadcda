"""`asyncinfer bench adapters`: requests with one LoRA adapter, with one each, and without."""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from asyncinfer import Engine
from asyncinfer.bench.record import BenchError, Figure

if TYPE_CHECKING:
    import torch

__all__ = ["AdapterOptions", "AdapterResult", "AdapterTurn", "measure_adapters"]

_SEED: Final = 17
#: Ranks of the adapters, in turns.
_RANKS: Final = (4, 8, 16, 32)
#: The one adapter has their mean, so that both kinds of batches take the same products.
_MEAN: Final = sum(_RANKS) // len(_RANKS)
_MODULES: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
#: Prompts are of token ids below, which every vocabulary has.
_TOKENS: Final = 128
#: What a batch with an adapter for each request shall reach of the speed with one for all.
_TARGET: Final = 0.85


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterOptions:
    """The work."""

    #: A checkpoint's folder, GGUF file, hub id or known name; None: `smollm2`.
    model: str | None = None
    #: Requests at once, and adapters of the batch that has one for each.
    running: int = 16
    #: Tokens of each prompt and of each answer.
    prompt: int = 32
    tokens: int = 64
    #: Threads of the engine; None: torch's number.
    threads: int | None = None
    #: What the adapters' files hold: "float32", "bfloat16" or "float16".
    dtype: str = "bfloat16"
    repeat: int = 5
    #: A smoke run.
    quick: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterTurn:
    """Tokens a second of the three kinds of batches, after their first tokens, one right after the
    other."""

    without: float
    one: float
    each: float


@dataclass(frozen=True, slots=True)
class AdapterResult:
    """Everything measured."""

    running: int
    ranks: tuple[int, ...]
    #: Bytes of all adapters in memory.
    adapter_bytes: int
    turns: tuple[AdapterTurn, ...]

    def figures(self) -> tuple[Figure, ...]:
        names = {
            "without": "no adapter",
            "one": "one adapter",
            "each": f"{self.running} adapters",
        }
        found = [
            Figure(
                name,
                statistics.median(getattr(turn, kind) for turn in self.turns),
                "tokens/s",
                "higher",
            )
            for kind, name in names.items()
        ]
        for kind, other, target in (("each", "one", _TARGET), ("one", "without", None)):
            # Within a turn, since the machine may have been slower in another.
            ratio = statistics.median(
                getattr(turn, kind) / getattr(turn, other) for turn in self.turns
            )
            name = f"{names[kind]} over {names[other]}"
            found.append(Figure(name, ratio, "x", "higher", target))
        return tuple(found)


def measure_adapters(
    options: AdapterOptions, report: Callable[[str], None] = lambda line: None
) -> AdapterResult:
    """Tokens a second of batches without adapters, with one for all of its requests, and with one
    for each, in turns within one process, on a CPU. Adapters are random ones of all projections.
    Raises `BenchError`."""
    if options.quick:
        options = replace(options, prompt=4, tokens=4, repeat=1)
    return asyncio.run(_measure(options, report))


async def _measure(options: AdapterOptions, report: Callable[[str], None]) -> AdapterResult:
    import torch

    from asyncinfer.models import check_fetched, examine, resolve

    dtype: torch.dtype = getattr(torch, options.dtype)
    path = resolve(options.model or "smollm2", check=check_fetched)
    shapes = _shapes(examine(path).config)
    ranks = [_RANKS[index % len(_RANKS)] for index in range(options.running)]
    draw = random.Random(_SEED)
    turns = []
    async with Engine(
        path,
        device="cpu",
        cpu_threads=options.threads,
        max_adapters=options.running + 1,
        max_adapter_rank=max(_RANKS),
        adapter_bytes=8 << 30,
        max_context=options.prompt + options.tokens + 1,
        max_running=options.running,
        prefix_cache=False,
    ) as engine:
        report("loading adapters")
        for index, rank in enumerate([*ranks, _MEAN]):
            await engine.adapters.load(
                str(index), _random_adapter(shapes, rank, index, dtype), config={"lora_alpha": rank}
            )
        held = sum(adapter.bytes for adapter in engine.adapters.list()[:-1])
        each: list[str | None] = [str(index) for index in range(options.running)]
        kinds: Mapping[str, list[str | None]] = {
            "without": [None] * options.running,
            "one": [str(options.running)] * options.running,
            "each": each,
        }
        for turn in range(options.repeat + 1):
            prompts = [
                [draw.randrange(3, _TOKENS) for _ in range(options.prompt)]
                for _ in range(options.running)
            ]
            speeds = {}
            for kind, adapters in kinds.items():
                done = await asyncio.gather(
                    *(
                        engine.generate(
                            prompt,
                            adapter=adapter,
                            max_tokens=options.tokens,
                            temperature=0.0,
                            ignore_eos=True,
                        )
                        for prompt, adapter in zip(prompts, adapters, strict=True)
                    )
                )
                # Prompts are another work, and are left out.
                speeds[kind] = sum(1 / result.timings.per_token for result in done)
            # The first turn is there to warm up.
            if turn:
                turns.append(AdapterTurn(**speeds))
                report(", ".join(f"{kind} {speed:.1f}" for kind, speed in speeds.items()))
    return AdapterResult(options.running, tuple(ranks), held, tuple(turns))


def _shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """The modules that adapters are made for, and the shapes `[out, in]` of their weights."""
    from asyncinfer.models import tensor_table

    found = {}
    if config is not None:
        for packed in tensor_table(config.published or config).values():
            for piece in packed.pieces:
                module = piece.name.removesuffix(".weight")
                if module.rpartition(".")[2] in _MODULES and module != piece.name:
                    found[module] = piece.shape
    if not found:
        raise BenchError(f"the model has none of the projections {', '.join(_MODULES)}")
    return found


def _random_adapter(
    shapes: Mapping[str, tuple[int, ...]], rank: int, seed: int, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """An adapter's tensors, which change the model a little."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for module, (outputs, inputs) in shapes.items():
        down = torch.randn(rank, inputs, generator=generator) * inputs**-0.5
        up = torch.randn(outputs, rank, generator=generator) * 0.01
        tensors[f"base_model.model.{module}.lora_A.weight"] = down.to(dtype)
        tensors[f"base_model.model.{module}.lora_B.weight"] = up.to(dtype)
    return tensors
