"""`LoraConfig`: an adapter's `adapter_config.json`, as PEFT writes it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from asyncinfer.errors import ModelLoadError, short_repr

__all__ = ["LoraConfig"]

CONFIG: Final = "adapter_config.json"
#: Keys of features that are not supported and change what an adapter computes, and their names.
_REFUSED: Final = {
    "use_dora": "DoRA",
    "use_qalora": "QALoRA",
    "use_bdlora": "block-diagonal LoRA",
    "lora_bias": "a bias of the adapter",
    "modules_to_save": "modules that are trained whole",
    "trainable_token_indices": "trained token embeddings",
    "layer_replication": "replicated layers",
    "target_parameters": "adapters of bare parameters",
    "alora_invocation_tokens": "activated LoRA",
    "arrow_config": "Arrow routing",
    "kasa_config": "KaSA",
    "monteclora_config": "MonteCLoRA",
    "velora_config": "VeLoRA",
}
#: Adapters that were cut out of the model's own weights, which training changed with them.
_FROM_WEIGHTS: Final = ("pissa", "corda", "olora", "loftq", "lora_ga")
#: Entries of a pattern, and characters of one. Each is matched against every module.
_MOST_PATTERNS: Final = 4096
_MOST_CHARS: Final = 256
#: PEFT's patterns are regular expressions, and a match holds the GIL to its end. So no group may
#: be repeated, and the ways in which a match may backtrack are bounded, for one pattern and for
#: all of them.
_PATTERN: Final = re.compile(r"[\w.\\|()*+?^$\[\]-]*")
_REPEATED: Final = re.compile(r"\)[*+?]")
_MOST_WAYS: Final = 1 << 18
_MOST_WAYS_OF_ALL: Final = 1 << 20
#: Places at which a repetition may end: about as many as a module's name has characters.
_PLACES: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """The part of the file that says how matrices are scaled. Raises `ModelLoadError`, naming the
    key."""

    #: None where the file does not say, as for a bare state dict.
    rank: int | None
    alpha: float
    rslora: bool = False
    #: Module pattern -> rank, and -> alpha.
    rank_pattern: tuple[tuple[str, int], ...] = ()
    alpha_pattern: tuple[tuple[str, float], ...] = ()
    #: The model it was trained on, as its maker named it.
    base: str | None = None

    @classmethod
    def read(cls, values: Mapping[str, Any], file: str) -> LoraConfig:
        """Read the file's content; `file` is its name for messages."""

        def refused(key: str, why: str) -> ModelLoadError:
            return ModelLoadError(f"{key}={short_repr(values[key])}: {why}", file=file)

        if values.get("peft_type", "LORA") != "LORA":
            raise refused("peft_type", "only LORA adapters are known")
        for key, feature in _REFUSED.items():
            if values.get(key):
                raise refused(key, f"not supported: {feature}")
        if values.get("bias", "none") not in ("none", None):
            raise refused("bias", "trained biases of the model are not supported")
        if str(values.get("init_lora_weights")).lower().startswith(_FROM_WEIGHTS):
            raise refused("init_lora_weights", "changed the model, too; PEFT can save it converted")
        given = values.get("r")
        rank = None if given is None else int(_positive("r", given, file, whole=True))
        if "lora_alpha" not in values:
            raise ModelLoadError("lora_alpha is missing: it scales the adapter", file=file)
        rslora = values.get("use_rslora", False)
        if not isinstance(rslora, bool):
            raise refused("use_rslora", "must be true or false")
        base = values.get("base_model_name_or_path")
        return cls(
            rank=rank,
            alpha=_positive("lora_alpha", values["lora_alpha"], file),
            rslora=rslora,
            rank_pattern=tuple(
                (key, int(number)) for key, number in _pattern("rank_pattern", values, file, True)
            ),
            alpha_pattern=_pattern("alpha_pattern", values, file, False),
            base=base if isinstance(base, str) and base else None,
        )

    def rank_of(self, module: str) -> int | None:
        """The rank that the file gives a module; None: any."""
        found = (rank for key, rank in self.rank_pattern if _named_by(key).match(module))
        return next(found, self.rank)

    def scale(self, module: str, rank: int) -> float:
        """What the product of a module's two matrices is multiplied by: `alpha / rank`, or
        `alpha / sqrt(rank)` (Kalajdzievski, 2023)."""
        found = (alpha for key, alpha in self.alpha_pattern if _named_by(key).match(module))
        return next(found, self.alpha) / (math.sqrt(rank) if self.rslora else rank)


# `re` itself keeps 512, and an adapter may name each module of a large model.
@lru_cache(maxsize=2 * _MOST_PATTERNS)
def _named_by(key: str) -> re.Pattern[str]:
    """Matches the modules that an entry names, by their names or ends, as PEFT looks them up."""
    return re.compile(rf"(.*\.)?({key})$")


def _pattern(
    name: str, values: Mapping[str, Any], file: str, whole: bool
) -> tuple[tuple[str, float], ...]:
    given = values.get(name) or {}
    if not isinstance(given, Mapping) or len(given) > _MOST_PATTERNS:
        raise ModelLoadError(f"{name}: must map at most {_MOST_PATTERNS} modules", file=file)
    ways = 0
    for key in given:
        if not isinstance(key, str) or not _is_pattern(key):
            raise ModelLoadError(
                f"{name}: {str(key)[:80]!r} must be the name of a module or of its end", file=file
            )
        ways += _ways(key)
        if ways > _MOST_WAYS_OF_ALL:
            raise ModelLoadError(f"{name}: takes too long to match", file=file)
        try:
            re.compile(key)
        except re.error as error:
            raise ModelLoadError(f"{name}: {key!r}: {error}", file=file) from error
    return tuple(
        (key, _positive(f"{name}[{key!r}]", value, file, whole=whole))
        for key, value in given.items()
    )


def _is_pattern(key: str) -> bool:
    plain = len(key) <= _MOST_CHARS and _PATTERN.fullmatch(key) and not _REPEATED.search(key)
    return bool(plain) and _ways(key) <= _MOST_WAYS


def _ways(key: str) -> int:
    """In how many ways a pattern may be matched at most, up to a bound: the product of what each
    repetition, each `?` and each group with alternatives may do."""
    ways: int = _PLACES ** min(4, key.count("*") + key.count("+")) << min(64, key.count("?"))
    bars, open_groups = 1, []
    for char in key:
        if char == "(":
            open_groups.append(bars)
            bars = 1
        elif char == "|":
            bars += 1
        elif char == ")" and open_groups:
            ways = min(ways * bars, 1 << 62)
            bars = open_groups.pop()
    return ways * bars


def _positive(name: str, value: object, file: str, *, whole: bool = False) -> float:
    kinds = int if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds):
        kind = "an integer" if whole else "a number"
        raise ModelLoadError(f"{name}={short_repr(value)}: must be {kind}", file=file)
    # Before it is a float: an integer may be larger than any.
    if not 0 < value <= 1e9:
        raise ModelLoadError(f"{name}={short_repr(value)}: must be in (0, 1e9]", file=file)
    return float(value)
