"""What to write in the place of a name that nothing here has."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import fields
from difflib import get_close_matches
from functools import wraps
from typing import Any, Final, TypeVar

from asyncinfer.errors import short_repr

__all__ = ["ELSEWHERE", "suggesting", "suggestion"]

T = TypeVar("T")

#: Characters of a name that are compared: the search takes time quadratic in the length.
_MOST: Final = 64
#: Options of vLLM, transformers, llama.cpp and OpenAI's API, and what they are called here: the
#: first of these that can be given where the name was.
ELSEWHERE: Final[dict[str, tuple[str, ...]]] = {
    "best_of": ("n",),
    "do_sample": ("temperature",),
    "gpu_memory_utilization": ("kv_fraction",),
    "guided_choice": ("choice", "response_format"),
    "guided_grammar": ("grammar", "response_format"),
    "guided_json": ("json_schema", "response_format"),
    "guided_regex": ("regex", "response_format"),
    "lora_request": ("adapter", "model"),
    "max_model_len": ("max_context",),
    "max_new_tokens": ("max_tokens",),
    "max_num_seqs": ("max_running",),
    "n_ctx": ("max_context",),
    "n_predict": ("max_tokens",),
    "n_threads": ("cpu_threads",),
    "num_beams": ("beams",),
    "num_return_sequences": ("n",),
    "repeat_penalty": ("repetition_penalty",),
    "response_format": ("json_schema",),
    "sampling_params": ("params",),
    "speculative_config": ("draft",),
    "structured_outputs": ("json_schema", "response_format"),
    "timeout": ("deadline",),
    "torch_dtype": ("dtype",),
}


def suggestion(name: str, known: Collection[str]) -> str:
    """The end of a message about an unknown name: what it is called here, or the nearest known
    name, if there is one."""
    for ours in ELSEWHERE.get(name, ()):
        if ours in known:
            return f"; did you mean {ours}?"
    near = get_close_matches(name[:_MOST], [*known], n=1)
    return f"; did you mean {near[0]}?" if near and name not in ELSEWHERE else ""


def suggesting(what: str) -> Callable[[type[T]], type[T]]:
    """Decorates a dataclass of options: the `TypeError` for an unknown name says what it is called
    here. `what` has these options."""

    def decorate(cls: type[T]) -> type[T]:
        init: Callable[..., None] = cls.__init__
        known = [field.name for field in fields(cls) if field.init]  # type: ignore[arg-type]

        @wraps(init)
        def checked(self: T, /, *args: Any, **options: Any) -> None:
            for name in options.keys() - known:
                shown, near = short_repr(options[name]), suggestion(name, known)
                raise TypeError(f"{name}={shown}: is no option of {what}{near}")
            init(self, *args, **options)

        setattr(cls, "__init__", checked)  # noqa: B010
        return cls

    return decorate
