"""The rules of `check_family`, each raising `RuleError` where it is broken."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any, Final

from asyncinfer.config import EngineConfig
from asyncinfer.engine import Loaded
from asyncinfer.errors import ModelLoadError, PluginError, short_repr
from asyncinfer.models import Decoder, ModelConfig
from asyncinfer.models.family_calls import FamilyCalls
from asyncinfer.models.leftovers import ignored_tensor
from asyncinfer.runner import runner_of
from asyncinfer.testing.family_cases import (
    ANSWER,
    LENGTHS,
    LIES,
    SHARED,
    UNLIKELY,
    FamilyReport,
    left_out,
    nearby,
    numeric_keys,
)
from asyncinfer.testing.family_trial import FamilyTrial, pieces, runs
from asyncinfer.testing.inline import InlineEngine
from asyncinfer.testing.random_model import filler_tokenizer
from asyncinfer.testing.rule_error import RuleError

__all__ = ["FamilyRules"]

#: Largest difference of two logits that counts as a tie, where either token may be drawn.
TIE: Final = 2e-4


class FamilyRules:
    """A family on one config of transformers, in order: `base` first."""

    def __init__(
        self,
        calls: FamilyCalls,
        config: Any,
        model_class: Any,
        folder: Path,
        tolerance: float,
        seed: int,
    ) -> None:
        self._calls = calls
        self._config = config
        self._class = model_class
        self._folder = folder
        self._tolerance = tolerance
        self._seed = seed
        random = Random(seed)
        self._ids = [
            [random.randrange(3, config.vocab_size) for _ in range(length)] for length in LENGTHS
        ]
        self._ids[-1][:SHARED] = self._ids[-2][:SHARED]

    def base(self) -> None:
        """Check the config as it was given."""
        trial = self._base = FamilyTrial(self._class, self._config, self._folder / "0", self._seed)
        self._shape = shape = self._read(trial)
        if self._read(trial) != shape:
            raise RuleError("read", "it reads the same config.json in two ways")
        try:
            decoder = trial.load(shape)
        except ModelLoadError as error:
            raise RuleError("tensors", str(error)) from error
        right = [trial.right(ids) for ids in self._ids]
        found = runs(decoder, self._ids)
        self._logits = found["whole prompts"].logits[0]
        for how, run in found.items():
            for row, got in enumerate(run.logits):
                first = SHARED if "prefix" in how and row == len(LENGTHS) - 1 else 0
                done = slice(first, run.done[row])
                self._compare("logits", how, got[done], right[row][done], first)
        self._greedy(decoder, trial)
        self._tensors(trial)

    def lies(self) -> None:
        """Check that impossible numbers are refused."""
        for key in numeric_keys(self._config):
            for value in (*UNLIKELY, *LIES):
                try:
                    shape = self._base.read(self._calls, {key: value})
                    # A key that the family does not read changes no shape.
                    if value in LIES and shape != self._shape:
                        taken = f"with {key}={short_repr(value)} it reads another decoder: "
                        raise RuleError("lies", taken + _difference(shape, self._shape))
                except ModelLoadError:
                    continue
                except PluginError as error:
                    raise RuleError("lies", f"with {key}={short_repr(value)}: {error}") from error

    def defaults(self) -> None:
        """Check what keys that are left out stand for."""
        for key in left_out(self._config):
            values = {name: value for name, value in self._base.values.items() if name != key}
            try:
                shape = self._calls.read(values, "config.json")
            except ModelLoadError:
                # The family may insist on the key.
                continue
            except PluginError as error:
                raise RuleError("defaults", f"without {key}: {error}") from error
            if shape != self._shape:
                stands = short_repr(self._base.values.get(key))
                raise RuleError(
                    "defaults",
                    f"without {key}, for which transformers takes {stands}, it reads another "
                    f"decoder: {_difference(shape, self._shape)}",
                )

    def nearby(self) -> FamilyReport:
        """Check configs with one key changed."""
        report = FamilyReport()
        for number, (name, changes) in enumerate(nearby(self._config), 1):
            folder = self._folder / str(number)
            try:
                config = type(self._config)(**{**self._config.to_dict(), **changes})
                trial = FamilyTrial(self._class, config, folder, self._seed, self._base)
                right = trial.right(self._ids[0])
            except Exception:
                report.not_taken.append(name)
                continue
            try:
                shape = trial.read(self._calls)
                # So it is the decoder of the config that was given.
                known = trial.alike and shape == self._shape
                decoder = None if known else trial.load(shape)
            except ModelLoadError as error:
                report.refused.append(f"{name}: {error}")
                continue
            except PluginError as error:
                raise RuleError("read", f"with {name}: {error}") from error
            ids = self._ids[0]
            got = pieces(decoder, ids, (25, 1)).logits[0] if decoder else self._logits
            self._compare("nearby", f"with {name}", got, right)
            report.compared.append(name)
        return report

    def _read(self, trial: FamilyTrial) -> ModelConfig:
        try:
            return trial.read(self._calls)
        except (ModelLoadError, PluginError) as error:
            raise RuleError("read", str(error)) from error

    def _compare(self, rule: str, how: str, got: Any, right: Any, first: int = 0) -> None:
        far = (got - right).abs().amax(dim=-1)
        for at, most in enumerate(far.tolist(), first):
            if math.isnan(most) or most > self._tolerance:
                raise RuleError(
                    rule,
                    f"{how}: the logits of token {at} differ from transformers' by up to {most:.2g}"
                    + (" (a family refuses what it does not compute)" if rule == "nearby" else ""),
                )

    def _greedy(self, decoder: Decoder, trial: FamilyTrial) -> None:
        """Through a whole engine: chunks of 24 tokens, prompts side by side, prefix hits."""
        engine = InlineEngine(
            _Decoded(decoder), device="cpu", dtype="float32", max_step_tokens=24, kv_bytes=1 << 26
        )
        options: Any = {"max_tokens": ANSWER, "temperature": 0.0, "ignore_eos": True}
        streams = [engine.submit(self._ids[-2], **options)]
        engine.run()
        streams += [engine.submit(ids, **options) for ids in (*self._ids[:-2], self._ids[-1])]
        engine.run()
        prompts = (self._ids[-2], *self._ids[:-2], self._ids[-1])
        for number, (stream, prompt) in enumerate(zip(streams, prompts, strict=True)):
            stream.read()
            if stream.error is not None:
                raise RuleError("greedy", f"prompt {number}: {stream.error!r}")
            answer = stream.token_ids()
            right = trial.right([*prompt, *answer])
            for at, token in enumerate(answer, len(prompt) - 1):
                best = right[at].max().item()
                if best - right[at, token].item() > TIE + 2 * self._tolerance:
                    raise RuleError(
                        "greedy",
                        f"prompt {number} of {len(prompt)} tokens: token {at + 1} is {token}, "
                        f"transformers takes {int(right[at].argmax())}",
                    )

    def _tensors(self, trial: FamilyTrial) -> None:
        names = trial.tensors()
        for name in names:
            more = f"{name.rpartition('.')[0]}.more"
            if ignored_tensor(more, self._shape):
                raise RuleError("tensors", f"it would ignore a tensor {more}: see names.ignored")
        for change in ({"add": f"{names[0]}.more"}, {"drop": names[-1]}):
            folder = trial.changed(self._folder / "changed", **change)
            try:
                trial.load(self._shape, folder)
            except ModelLoadError:
                continue
            (what, name) = next(iter(change.items()))
            raise RuleError("tensors", f"it loads a checkpoint changed by {what} {name}")


class _Decoded:
    """A `ModelSource` of a decoder that is loaded already."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder

    def load(self, config: EngineConfig, progress: Any = None) -> Loaded:
        vocabulary = self._decoder.config.vocab_size
        return Loaded(runner_of(self._decoder, config, vocabulary), filler_tokenizer(vocabulary))


def _difference(one: ModelConfig, other: ModelConfig) -> str:
    names: Sequence[str] = [*type(one).__dataclass_fields__]
    found = [
        f"{name}={short_repr(getattr(one, name))} instead of {short_repr(getattr(other, name))}"
        for name in names
        if getattr(one, name) != getattr(other, name)
    ]
    return ", ".join(found)
