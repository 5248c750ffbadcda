"""A decode step with its delivery does not grow: it is to be read in one sitting."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from benchmarks.decode_step_size import measure

from asyncinfer.kernels.native import available

#: May be lowered. Which kernels and layouts run depends on the processor a little, and how far the
#: decode thread is ahead on the machine's load. Half of the files are the model's: a product, a
#: norm and an attention have a file each, since one looks for them by name. Each part of the
#: scheduler, the sampler and the engine is one more.
MOST_FILES = 40
MOST_LINES = 740


@pytest.mark.slow
def test_a_decode_step_does_not_grow(report: Callable[[str], None]) -> None:
    size = measure()
    report(str(size))
    # A step that was counted whole: from the model's layers, or what replays them, to the stream
    # that has its chunk.
    layers = "runner/replay_executor.py" if available() else "models/decoder.py"
    for part in (layers, "scheduler/scheduler.py", "engine/stream.py"):
        assert size.files[part] > 5, f"{part}: {size.files}"
    assert len(size.files) <= MOST_FILES
    assert size.lines <= MOST_LINES
