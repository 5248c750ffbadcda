"""`GenerationDefaults`: a model's own sampling options, for requests that do not give any."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from asyncinfer.errors import InvalidRequest, ModelLoadError
from asyncinfer.files import checkpoint_file, read_json
from asyncinfer.params import SamplingParams

__all__ = ["GenerationDefaults", "generation_defaults"]

_MOST_BYTES: Final = 16 << 20
#: Options without effect on a greedy request: naming one of them asks for sampling.
_DRAWING: Final = ("temperature", "top_k", "top_p", "min_p", "typical_p")
#: Options that take effect in a greedy request, too.
_ALWAYS: Final = ("repetition_penalty",)


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """The content of a model's `generation_config.json`."""

    #: Whether a request that names no sampling option takes the most likely tokens.
    greedy: bool = False
    #: Values of single options, which hold wherever a request does not name them.
    values: Mapping[str, Any] = field(default_factory=dict)

    def params(self, named: Mapping[str, Any]) -> SamplingParams:
        """The options of a request that names these. Raises `InvalidRequest`, and `TypeError` for
        an unknown name."""
        if not self.greedy or _asks_for_sampling(named):
            return SamplingParams(**{**self.values, **named})
        plain = {name: value for name, value in self.values.items() if name in _ALWAYS}
        return SamplingParams(**{**plain, "temperature": 0.0, **named})


def generation_defaults(folder: Path) -> GenerationDefaults:
    """The defaults of the model in `folder`, read as Transformers reads them: without `do_sample`
    it is greedy. Without a file, or an option in it, they are those of `SamplingParams`.

    Raises `ModelLoadError` if the file cannot be read, or an effective option is out of bounds.
    """
    path = checkpoint_file(folder, "generation_config.json")
    given = {} if path is None else read_json(path, _MOST_BYTES)
    samples = given.get("do_sample") or False
    if not isinstance(samples, bool):
        raise ModelLoadError(f"do_sample={samples!r}: must be true or false", file=str(path))
    values: dict[str, Any] = {}
    for name in (*_DRAWING, *_ALWAYS):
        value = given.get(name)
        if value is None:
            continue
        try:
            greedy = SamplingParams(**{name: value}).greedy
        except InvalidRequest as error:
            if samples or name in _ALWAYS:
                raise ModelLoadError(str(error), file=str(path)) from error
            # Transformers ignores these options of a greedy model.
            continue
        if samples or not greedy:
            values[name] = value
    return GenerationDefaults(not samples, values)


def _asks_for_sampling(named: Mapping[str, Any]) -> bool:
    several = "n" in named and named["n"] != 1
    chosen = named.get("seed") is not None or named.get("sampler") is not None
    return several or chosen or any(name in named for name in _DRAWING)
