"""llama.cpp's logits of a GGUF file, in a process of its own: it ends the one that it does not like
a file in.

python -m models.llama_cpp_logits model.gguf tokens.json logits.npy
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from asyncinfer.bench.peers.llama_cpp import LlamaPeer

__all__ = ["llama_cpp_logits"]


def llama_cpp_logits(path: Path, ids: Sequence[int]) -> np.ndarray[Any, Any]:
    """float32 `[tokens, vocab]`: after each of the tokens, with keys and values in float32."""
    tokens, logits = path.with_name("tokens.json"), path.with_name("logits.npy")
    tokens.write_text(json.dumps(list(ids)))
    command = [sys.executable, "-m", __name__, str(path), str(tokens), str(logits)]
    # Its trace would be of a debugger that it starts.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "GGML_NO_BACKTRACE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"llama.cpp ended with {done.returncode}: {done.stderr}"
    read: np.ndarray[Any, Any] = np.load(logits)
    return read


def main(path: str, tokens: str, logits: str) -> None:
    ids = json.loads(Path(tokens).read_text())
    peer = LlamaPeer(Path(path), threads=1, context=256, requests=1, kv="float32")
    with closing(peer):
        np.save(logits, peer.logits(ids))


if __name__ == "__main__":
    main(*sys.argv[1:])
