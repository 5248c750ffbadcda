"""llama.cpp through its batch interface."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import numpy as np

    from asyncinfer.bench.peers.worker import Setup

__all__ = ["LlamaPeer", "has_llama", "open_peer"]


#: ggml's numbers of types, the last of which has no name in its Python module.
_KV_TYPES: Final = {"float32": 0, "float16": 1, "bfloat16": 30}


def has_llama() -> bool:
    """Whether llama-cpp-python is installed."""
    return find_spec("llama_cpp") is not None


def open_peer(setup: Setup) -> LlamaPeer:
    """See `worker.Peer`. One sequence more than run together holds a shared prefix."""
    return LlamaPeer(
        Path(setup["gguf"]),
        threads=setup["threads"],
        context=setup["context"],
        requests=setup["running"] + 1,
        kv=setup["dtype"],
    )


class LlamaPeer:
    """Runs every request as a sequence of one context. A step has a token of each, and the next
    token is the largest logit."""

    def __init__(
        self, path: Path, *, threads: int, context: int, requests: int, kv: str = "float16"
    ) -> None:
        """`context`: tokens of a request, prompt and answer together; `kv`: the type of its KV."""
        self._api: Any = import_module("llama_cpp")
        self.version: str = self._api.__version__
        api = self._api
        # Silences a log line for every tensor. The callback must live as long as it is set.
        self._quiet = api.llama_log_callback(lambda level, text, data: None)
        api.llama_log_set(self._quiet, None)
        api.llama_backend_init()
        self._model = api.llama_model_load_from_file(
            str(path).encode(), api.llama_model_default_params()
        )
        self._words = api.llama_model_get_vocab(self._model)
        params = api.llama_context_default_params()
        params.n_ctx, params.n_seq_max = context * requests, requests
        params.n_batch = params.n_ubatch = 512
        params.n_threads = params.n_threads_batch = threads
        params.type_k = params.type_v = _KV_TYPES[kv]
        self._context = api.llama_init_from_model(self._model, params)
        self._vocab = api.llama_vocab_n_tokens(self._words)
        self._most = 512
        self._requests = requests

    def close(self) -> None:
        """Give its memory back."""
        self._api.llama_free(self._context)
        self._api.llama_model_free(self._model)
        self._api.llama_log_set(self._api.llama_log_callback(0), None)

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a text, in which control tokens may be spelt and nothing is put before."""
        data = text.encode()
        ids = (self._api.llama_token * (len(data) + 8))()
        count = self._api.llama_tokenize(self._words, data, len(data), ids, len(ids), False, True)
        return list(ids[:count])

    def logits(self, tokens: Sequence[int]) -> np.ndarray[Any, Any]:
        """float32 `[len(tokens), vocabulary]`: of one sequence, after each of its tokens."""
        numpy: Any = import_module("numpy")
        api = self._api
        api.llama_memory_clear(api.llama_get_memory(self._context), True)
        found = []
        for start in range(0, len(tokens), self._most):
            rows = [
                (token, start + place, 0)
                for place, token in enumerate(tokens[start : start + self._most])
            ]
            found += self._step(rows, range(len(rows)))
        stacked: np.ndarray[Any, Any] = numpy.stack(found)
        return stacked

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
        """Greedy answers of so many tokens to all prompts at once."""
        api = self._api
        api.llama_memory_clear(api.llama_get_memory(self._context), True)
        answers: list[list[int]] = []
        for row, prompt in enumerate(prompts):
            for start in range(0, len(prompt), self._most):
                part = prompt[start : start + self._most]
                last = start + len(part) == len(prompt)
                rows = [(token, start + place, row) for place, token in enumerate(part)]
                found = self._step(rows, [len(part) - 1] if last else [])
            answers.append([int(found[0].argmax())])
        for place in range(tokens - 1):
            rows = [
                (answer[-1], len(prompts[row]) + place, row) for row, answer in enumerate(answers)
            ]
            for answer, logits in zip(answers, self._step(rows, range(len(rows))), strict=True):
                answer.append(int(logits.argmax()))
        return answers

    def warm(self, prefix: list[int]) -> None:
        """Compute a prefix in the last sequence, from which others copy it."""
        self._forget(self._requests - 1)
        for start in range(0, len(prefix), self._most):
            part = prefix[start : start + self._most]
            self._step([(token, start + i, self._requests - 1) for i, token in enumerate(part)], [])

    def run(self, requests: Sequence[tuple[list[int], int]], shared: int) -> list[list[int]]:
        """See `worker.Peer`: continuous batching, in which prompts use what decoding leaves."""
        waiting, free = deque(range(len(requests))), list(range(self._requests - 1))
        answers: list[list[int]] = [[] for _ in requests]
        #: For each used sequence, its request and how many tokens of the prompt are computed.
        running: dict[int, list[int]] = {}
        while waiting or running:
            while waiting and free:
                sequence = free.pop()
                self._forget(sequence)
                if shared:
                    self._copy(self._requests - 1, sequence)
                running[sequence] = [waiting.popleft(), shared]
            rows: list[tuple[int, int, int]] = []
            drawn: dict[int, int] = {}
            for sequence, (request, _) in running.items():
                if answer := answers[request]:
                    drawn[len(rows)] = sequence
                    place = len(requests[request][0]) + len(answer) - 1
                    rows.append((answer[-1], place, sequence))
            for sequence, state in running.items():
                request, done = state
                prompt = requests[request][0]
                part = prompt[done : done + self._most - len(rows)]
                rows += [(token, done + i, sequence) for i, token in enumerate(part)]
                state[1] = done + len(part)
                if part and state[1] == len(prompt):
                    drawn[len(rows) - 1] = sequence
            for sequence, logits in zip(drawn.values(), self._step(rows, list(drawn)), strict=True):
                request = running[sequence][0]
                answers[request].append(int(logits.argmax()))
                if len(answers[request]) == requests[request][1]:
                    del running[sequence]
                    free.append(sequence)
        return answers

    def _forget(self, sequence: int) -> None:
        memory = self._api.llama_get_memory(self._context)
        self._api.llama_memory_seq_rm(memory, sequence, -1, -1)

    def _copy(self, source: int, target: int) -> None:
        memory = self._api.llama_get_memory(self._context)
        self._api.llama_memory_seq_cp(memory, source, target, -1, -1)

    def _step(
        self, rows: Sequence[tuple[int, int, int]], drawn: Sequence[int]
    ) -> list[np.ndarray[Any, Any]]:
        """Compute `(token, position, sequence)`s; the logits after each of the `drawn` ones."""
        api = self._api
        batch = api.llama_batch_init(len(rows), 0, 1)
        try:
            batch.n_tokens = len(rows)
            for index, (token, position, sequence) in enumerate(rows):
                batch.token[index], batch.pos[index] = token, position
                batch.n_seq_id[index], batch.seq_id[index][0] = 1, sequence
                batch.logits[index] = index in drawn
            if api.llama_decode(self._context, batch):
                raise RuntimeError("llama_decode failed")
        finally:
            api.llama_batch_free(batch)
        numpy: Any = import_module("numpy")
        found = []
        for index in drawn:
            logits = api.llama_get_logits_ith(self._context, index)
            # The next step writes to the same memory.
            found.append(numpy.ctypeslib.as_array(logits, (self._vocab,)).copy())
        return found
