"""Other engines on the same checkpoint and the same work, each in a process of its own.

A process that ends gives the device back whole, and one that takes too long can be ended.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

from asyncinfer.bench.record import BenchError

__all__ = ["GPU_PEERS", "PeerWork", "importable_peers", "run_peer"]

_PATIENCE: Final = 60.0


@dataclass(frozen=True, slots=True)
class PeerWork:
    """Requests, all submitted at once: greedy, past the end of text."""

    folder: Path
    prompts: Sequence[Sequence[int]]
    #: Tokens of each answer.
    outputs: Sequence[int]
    device: str

    @property
    def longest(self) -> int:
        return max(len(p) + n for p, n in zip(self.prompts, self.outputs, strict=True))


def importable_peers() -> list[str]:
    """Those of `GPU_PEERS` whose packages are installed."""
    return [name for name, (package, _) in GPU_PEERS.items() if find_spec(package) is not None]


def run_peer(name: str, work: PeerWork, timeout: float) -> float:
    """Seconds of the peer for the work, its model loaded and warm. `BenchError` if it raises, gives
    another number of tokens, or is not done in time."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(name, work, theirs), daemon=False)
    process.start()
    theirs.close()
    try:
        if not ours.poll(timeout):
            process.terminate()
            raise BenchError(f"{name}: not done in {timeout:.0f} s")
        answer = ours.recv()
    except EOFError:
        raise BenchError(f"{name}: its process ended") from None
    finally:
        ours.close()
        process.join(5.0)
        if process.is_alive():
            process.terminate()
            process.join(10.0)
        if process.is_alive():
            process.kill()
            process.join()
    if isinstance(answer, str):
        raise BenchError(f"{name}: {answer}")
    return float(answer)


def _serve(name: str, work: PeerWork, answer: Connection) -> None:
    try:
        result: float | str = GPU_PEERS[name][1](work)
    except Exception as error:  # whatever another project raises, told in the other process
        result = f"{type(error).__name__}: {error}"
    answer.send(result)
    answer.close()


def _transformers(work: PeerWork) -> Any:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    # Our own progress is shown already.
    logging.disable_progress_bar()
    model: Any = AutoModelForCausalLM.from_pretrained(work.folder, dtype=torch.bfloat16)
    return model.to(work.device).eval()


def _continuous(work: PeerWork) -> float:
    """transformers' continuous batching, through its manager: every answer has its own length."""
    from transformers import GenerationConfig

    model = _transformers(work)
    config: Any = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    options: dict[str, Any] = {"generation_config": config}
    if work.device == "cpu":
        # By default it takes most of the host's memory.
        from transformers import ContinuousBatchingConfig

        options["continuous_batching_config"] = ContinuousBatchingConfig(
            num_blocks=8 * len(work.prompts), max_batch_tokens=256
        )
    with model.continuous_batching_context_manager(**options) as manager:

        def run(prompts: Sequence[Sequence[int]], outputs: Sequence[int]) -> float:
            wanted = {}
            began = time.perf_counter()
            for prompt, output in zip(prompts, outputs, strict=True):
                wanted[manager.add_request(list(prompt), max_new_tokens=output)] = output
            while wanted:
                result = manager.get_result(timeout=_PATIENCE)
                if result is None:
                    raise RuntimeError(f"no answer for {_PATIENCE:.0f} s, or it stopped")
                if result.error is not None:
                    raise RuntimeError(result.error)
                if result.is_finished():
                    _counted(len(result.generated_tokens), wanted.pop(result.request_id))
            return time.perf_counter() - began

        run(work.prompts[:2], [4] * len(work.prompts[:2]))
        return run(work.prompts, work.outputs)


def _static(work: PeerWork) -> float:
    """transformers' `generate` with a static cache, uncompiled, all requests in one padded batch
    that goes on until its longest answer is done."""
    import torch

    model = _transformers(work)
    model.generation_config.eos_token_id = None
    longest = max(map(len, work.prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + list(p) for p in work.prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in work.prompts])

    def run(tokens: int) -> float:
        began = time.perf_counter()
        with torch.inference_mode():
            answer = model.generate(
                ids.to(work.device),
                attention_mask=mask.to(work.device),
                max_new_tokens=tokens,
                do_sample=False,
                pad_token_id=0,
                cache_implementation="static",
                disable_compile=True,
            )
        _counted(answer.shape[1] - longest, tokens)
        answer.cpu()
        return time.perf_counter() - began

    run(2)
    return run(max(work.outputs))


def _mini_sglang(work: PeerWork) -> float:
    """mini-sglang, offline, with its own defaults beside what the work needs."""
    import torch

    # Not a dependency: nothing is known of its types.
    core, llm = import_module("minisgl.core"), import_module("minisgl.llm")
    engine = llm.LLM(
        str(work.folder),
        dtype=torch.bfloat16,
        max_running_req=len(work.prompts),
        max_seq_len_override=work.longest + 16,
        cuda_graph_max_bs=len(work.prompts),
    )

    def run(prompts: Sequence[Sequence[int]], outputs: Sequence[int]) -> float:
        params = [
            core.SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=n) for n in outputs
        ]
        began = time.perf_counter()
        answers = engine.generate([list(prompt) for prompt in prompts], params)
        spent = time.perf_counter() - began
        for answer, output in zip(answers, outputs, strict=True):
            _counted(len(answer["token_ids"]), output)
        return spent

    # Not the work's own prompts: they would be cached.
    run([[token + 1 for token in work.prompts[0][:32]]], [8])
    return run(work.prompts, work.outputs)


def _counted(given: int, wanted: int) -> None:
    if given != wanted:
        raise BenchError(f"gave {given} of {wanted} tokens")


#: Name -> (package, what runs it).
GPU_PEERS: Final[Mapping[str, tuple[str, Callable[[PeerWork], float]]]] = {
    "mini-sglang": ("minisgl", _mini_sglang),
    "transformers continuous batching": ("transformers", _continuous),
    "transformers static cache": ("transformers", _static),
}
