"""OpenVINO GenAI's continuous batching, on a model that Optimum converts from the checkpoint."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncinfer.bench.peers.worker import Setup

__all__ = ["open_peer"]


def open_peer(setup: Setup) -> OpenVinoPeer:
    """See `worker.Peer`."""
    return OpenVinoPeer(setup)


class OpenVinoPeer:
    """A pipeline that is stepped until all requests are done."""

    def __init__(self, setup: Setup) -> None:
        self._api: Any = import_module("openvino_genai")
        self.version: str = self._api.__version__
        self._openvino: Any = import_module("openvino")
        self._count = 0
        precision = {"float32": "f32", "bfloat16": "bf16"}[setup["dtype"]]
        schedule = self._api.SchedulerConfig()
        schedule.max_num_seqs = setup["running"]
        schedule.cache_size = 2
        schedule.enable_prefix_caching = True
        with tempfile.TemporaryDirectory(prefix="asyncinfer-bench-") as folder:
            export: Any = import_module("optimum.exporters.openvino").main_export
            export(setup["folder"], folder, task="text-generation-with-past", stateful=True)
            options = {
                "INFERENCE_PRECISION_HINT": precision,
                "KV_CACHE_PRECISION": precision,
                "INFERENCE_NUM_THREADS": setup["threads"],
            }
            self._pipeline: Any = self._api.ContinuousBatchingPipeline(
                folder, schedule, "CPU", options
            )

    def warm(self, prefix: list[int]) -> None:
        """The prefix cache keeps whatever was computed."""
        self.run([(prefix, 1)], 0)

    def run(self, requests: Sequence[tuple[list[int], int]], shared: int) -> list[list[int]]:
        """See `worker.Peer`."""
        numpy: Any = import_module("numpy")
        handles = []
        for prompt, tokens in requests:
            config = self._api.GenerationConfig()
            config.max_new_tokens, config.ignore_eos, config.do_sample = tokens, True, False
            ids = self._openvino.Tensor(numpy.array([prompt], dtype=numpy.int64))
            self._count += 1
            handles.append(self._pipeline.add_request(self._count, ids, config))
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        return [list(handle.read_all()[0].generated_ids) for handle in handles]
