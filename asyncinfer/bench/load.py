"""`asyncinfer bench load`: our loading beside safetensors' `load_file` and transformers'
`from_pretrained`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from asyncinfer.bench.checkpoint import write_checkpoint
from asyncinfer.bench.record import BenchError, Figure

if TYPE_CHECKING:
    from asyncinfer.bench.load_once import TimedLoad

__all__ = ["LoadOptions", "LoadResult", "measure_load", "write_layers"]

_GIGA: Final = 1e9
_OURS: Final = "asyncinfer"
_WEIGHTS: Final = "asyncinfer, weights alone"
_ENGINE: Final = "asyncinfer, engine"
_READ: Final = "read"
_SECOND: Final = "asyncinfer, second start"
_BYTES: Final = "its bytes, mapped"
#: A second start may take so many times as long as looking at each byte of the copy.
_MOST_SECOND: Final = 1.3
#: Opening an engine may take so many times as long as reading a quantised model's bytes.
_MOST: Final = 1.5
#: Shape of the random model: a layer of this width has 45 million parameters.
_SHAPE: Final = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 16_000,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
_TINY: Final = {
    **_SHAPE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}
#: As `_TINY`, in a size that all layouts of quantised matrices support.
_SMALL: Final = {**_TINY, "hidden_size": 256, "intermediate_size": 512}
#: About the bits of a number in the layers.
_BITS: Final = {"gguf": 5, "fp8": 8, "gptq": 4, "awq": 4, "compressed-tensors": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """Options of the benchmark."""

    #: A checkpoint's folder; None: a random Llama of about so many megabytes.
    model: str | None = None
    megabytes: int = 1500
    #: "plain", or one of `quantised_model.LAYOUTS`: how the random model is stored. For a GGUF file
    #: and a quantised checkpoint, opening an engine is compared with reading their bytes.
    layout: str = "plain"
    #: "auto" is CUDA where there is one.
    device: str = "auto"
    #: "auto" is bfloat16 on a GPU, and float16 on a CPU. A CPU's matrix products need other dtypes
    #: laid out anew, which no other loader does.
    dtype: str = "auto"
    peer: bool = True
    repeat: int = 3
    #: A smoke run on a tiny model.
    quick: bool = False


@dataclass(frozen=True, slots=True)
class LoadResult:
    """All loads, in the order of the repetitions."""

    device: str
    dtype: str
    bytes: int
    runs: dict[str, tuple[TimedLoad, ...]]

    def figures(self) -> tuple[Figure, ...]:
        found = []
        for name, runs in self.runs.items():
            rate = self.bytes / _GIGA / self.seconds(name)
            found.append(Figure(f"{name}: rate", rate, "GB/s", "higher"))
            found.append(Figure(f"{name}: CPU time", self._cpu(name), "s", "lower"))
            peak = median(run.peak_bytes for run in runs)
            found.append(Figure(f"{name}: peak host memory", peak / _GIGA, "GB", "lower"))
        if _READ in self.runs:
            ratio = 1 / self._ratio(_ENGINE, _READ)
            found.append(Figure(f"{_ENGINE} over {_READ}: time", ratio, "x", "lower", _MOST))
            cpu = self._cpu(_ENGINE) / self._cpu(_READ)
            found.append(Figure(f"{_ENGINE} over {_READ}: CPU time", cpu, "x", "lower"))
        if _SECOND in self.runs:
            ratio = 1 / self._ratio(_SECOND, _BYTES)
            label = f"{_SECOND}, over {_BYTES}: time"
            found.append(Figure(label, ratio, "x", "lower", _MOST_SECOND))
        for name, target in (("load_file", 0.9), ("from_pretrained", 1.0)):
            if name in self.runs:
                ratio = self._ratio(_OURS, name)
                found.append(Figure(f"{_OURS} over {name}", ratio, "x", "higher", target))
                ratio = self._ratio(_WEIGHTS, name)
                found.append(Figure(f"{_WEIGHTS}, over {name}", ratio, "x", "higher"))
        return tuple(found)

    def _ratio(self, ours: str, theirs: str) -> float:
        """How many times as fast as theirs ours is: the median over the repetitions, because a
        machine's speed changes between them."""
        pairs = zip(self.runs[ours], self.runs[theirs], strict=True)
        return median(their.seconds / our.seconds for our, their in pairs)

    def _cpu(self, loader: str) -> float:
        return median(run.cpu_seconds for run in self.runs[loader])

    def seconds(self, loader: str) -> float:
        """The median seconds of a loader."""
        return median(run.seconds for run in self.runs[loader])


def measure_load(
    options: LoadOptions, report: Callable[[str], None] = lambda _: None
) -> LoadResult:
    """Load by each loader in turn, each time in a new process. Raises `BenchError`."""
    # Imported here: the other benchmarks need no torch.
    import torch

    from asyncinfer.bench.load_once import LOADERS, load_once
    from asyncinfer.bench.peers import require_transformers

    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = options.dtype
    if dtype == "auto":
        dtype = "float16" if device == "cpu" else "bfloat16"
    if options.layout != "plain" and options.model is not None:
        raise BenchError("layout: is of random weights; leave it out with a model")
    if options.model is not None and not Path(options.model).exists():
        raise BenchError(f"model {options.model!r}: there is no such folder, and no such GGUF file")
    quantised = options.layout != "plain" or _is_quantised(options.model)
    if quantised:
        loaders = ["asyncinfer", _ENGINE, _READ, _SECOND, _BYTES]
        # The dtype that a CPU computes such models in.
        dtype = "float32" if device == "cpu" and options.dtype == "auto" else dtype
    else:
        if options.peer:
            require_transformers()
        others = (_ENGINE, _READ, *(() if options.peer else ("from_pretrained",)))
        loaders = [name for name in LOADERS if name not in others]
    if device != "cpu":
        # Files cannot be mapped onto a GPU.
        mapped = ("load_file, mapped", _SECOND, _BYTES)
        loaders = [name for name in loaders if name not in mapped]
    runs: dict[str, list[TimedLoad]] = {name: [] for name in loaders}
    with tempfile.TemporaryDirectory(prefix="asyncinfer-bench-") as scratch:
        warm_up, folder = Path(scratch, "tiny"), Path(options.model or Path(scratch, "model"))
        if options.model is None:
            report("writing the random model")
        if quantised:
            from asyncinfer.bench.quantised_model import write_quantised

            layout = options.layout if options.model is None else "gguf"
            warm_up = write_quantised(_SMALL, 2, warm_up, layout)
            if options.model is None:
                shape, bits = (_SMALL, 16) if options.quick else (_SHAPE, _BITS[layout])
                layers = 2 if options.quick else _layers(_SHAPE, options.megabytes * 16 // bits)
                folder = write_quantised(shape, layers, folder, layout)
        else:
            write_layers(_TINY, 2, warm_up, dtype)
            if options.model is None and options.quick:
                write_layers(_TINY, 4, folder, dtype)
            elif options.model is None:
                write_layers(_SHAPE, _layers(_SHAPE, options.megabytes), folder, dtype)
        size = _read_through(folder)
        copies = Path(scratch, "copies")
        if _SECOND in loaders:
            report("writing a copy of the weights")
            load_once(_SECOND, folder, warm_up, device, dtype, copies)
        for repetition in range(options.repeat):
            for name in loaders:
                report(f"{name} ({repetition + 1} of {options.repeat})")
                own = copies if name in (_SECOND, _BYTES) else None
                runs[name].append(load_once(name, folder, warm_up, device, dtype, own))
    found = {name: tuple(loads) for name, loads in runs.items()}
    return LoadResult(device, dtype, size, found)


def write_layers(shape: dict[str, Any], layers: int, folder: Path, dtype: str) -> None:
    """Write a random checkpoint of `shape` with so many layers, in four shards."""
    write_checkpoint({**shape, "num_hidden_layers": layers, "dtype": dtype}, folder, shards=4)


def _layers(shape: dict[str, Any], megabytes: int) -> int:
    """About as many as fill so many megabytes with 16 bits each."""
    hidden, inner = int(shape["hidden_size"]), int(shape["intermediate_size"])
    kv = hidden * int(shape["num_key_value_heads"]) // int(shape["num_attention_heads"])
    layer = 2 * hidden * (2 * hidden + 2 * kv + 3 * inner)
    return max(1, round((megabytes * 1e6 - 4 * hidden * int(shape["vocab_size"])) / layer))


def _is_quantised(model: str | None) -> bool:
    """Whether a folder's `config.json` is of a quantised model, or the model is a GGUF file."""
    if model is None:
        return False
    if Path(model).is_file():
        return True
    from asyncinfer.models import read_config

    return Path(model, "config.json").is_file() and read_config(model).scheme is not None


def _read_through(folder: Path) -> int:
    """Bytes of the files, which are then in the page cache."""
    from asyncinfer.bench.load_once import weight_files

    size = 0
    for path in weight_files(folder):
        with path.open("rb", buffering=0) as file:
            while block := file.read(16 << 20):
                size += len(block)
    if not size:
        raise BenchError(f"{folder}: no safetensors in it")
    return size
