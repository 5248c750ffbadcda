"""`check_family`: whether a model family computes what transformers computes."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from asyncinfer.plugins.timed_call import CallTimeout, call_within
from asyncinfer.testing.family_cases import ANSWER, LENGTHS, FamilyReport
from asyncinfer.testing.rule_error import RuleError

__all__ = ["check_family"]

MOST_PARAMETERS: Final = 30_000_000


def check_family(
    family: Callable[[], Any],
    model: Any,
    *,
    tolerance: float = 1e-4,
    seed: int = 0,
    patience: float = 600.0,
) -> FamilyReport:
    """Hold a family against transformers, on a CPU in float32. For pytest::

        def test_my_family():
            check_family(MyFamily, StableLmConfig(hidden_size=64, ...))

    The rules: it can be made, and reads the config into a `ModelConfig`, the same each time
    (*made*, *read*); the checkpoint that transformers writes is loaded without a tensor missing or
    left over, and is refused with one more or one less (*tensors*); logits are transformers', for a
    whole prompt, in chunks, in a mixed batch and after a prefix hit (*logits*); an engine's greedy
    answers are (*greedy*); a config with any one key changed is read right or refused, not taken
    for another (*nearby*); a key that is left out stands for what transformers takes it for
    (*defaults*); a key that lies is refused with a `ModelLoadError` (*lies*); all of it ends
    (*returns*).

    Args:
        family: makes a family, such as its class.
        model: a config of transformers, or a model of which the config is taken: a small one, in
            an odd shape, of 30 million parameters and 96 positions or so. Weights are random.
        tolerance: by which a logit may differ.
        seed: of weights and prompts.
        patience: seconds that all of it may take.

    Raises:
        RuleError: the rule that is broken, and how.
        ValueError: for a model that cannot be tried.
    """
    try:
        return call_within(patience, _check, family, model, tolerance, seed)
    except CallTimeout as error:
        raise RuleError("returns", f"the check {error}") from error


def _check(family: Callable[[], Any], model: Any, tolerance: float, seed: int) -> FamilyReport:
    # Imported here: tests on a fake model need no torch.
    from asyncinfer.models.family_calls import FamilyCalls
    from asyncinfer.runner.device import use_cpu_threads
    from asyncinfer.testing.family_rules import FamilyRules

    # Tensors this small are slower on several threads. The setting is this thread's alone.
    use_cpu_threads(1)
    config, model_class = _target(model)
    try:
        made = family()
    except BaseException as error:
        raise RuleError("made", f"it cannot be made: {error!r}") from error
    name = getattr(family, "__name__", repr(family))
    calls = FamilyCalls(model_class.__name__, made, f"family {name}")
    with tempfile.TemporaryDirectory() as folder:
        rules = FamilyRules(calls, config, model_class, Path(folder), tolerance, seed)
        rules.base()
        rules.lies()
        rules.defaults()
        return rules.nearby()


def _target(model: Any) -> tuple[Any, Any]:
    """The config, and the class of its model."""
    import torch
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel

    config: Any = model
    model_class: Any = None
    if isinstance(model, PreTrainedModel):
        config, model_class = model.config, type(model)
    elif not isinstance(model, PreTrainedConfig):
        raise ValueError(f"model={model!r}: must be a config or a model of transformers")
    if model_class is None:
        model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    with torch.device("meta"):
        parameters = model_class(config).num_parameters()
    if parameters > MOST_PARAMETERS:
        bound = f"must have {MOST_PARAMETERS:,} parameters at most, not {parameters:,}"
        raise ValueError(f"model={type(model).__name__}: {bound}")
    positions, vocabulary = config.max_position_embeddings, config.vocab_size
    if positions < max(LENGTHS) + ANSWER or vocabulary < 16:
        bound = f"must have {max(LENGTHS) + ANSWER} positions and 16 tokens or more"
        raise ValueError(f"model={type(model).__name__}: {bound}")
    return config, model_class
