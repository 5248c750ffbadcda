"""`check_sampler`: whether a sampler plugin keeps the rules, and which one it breaks."""

from __future__ import annotations

from asyncinfer import plugins
from asyncinfer.errors import AsyncInferError, PluginError
from asyncinfer.protocols import SamplerPlugin
from asyncinfer.testing.rule_error import RuleError

__all__ = ["check_sampler"]


def check_sampler(sampler: SamplerPlugin | str, *, device: str = "cpu") -> None:
    """Run a sampler plugin, through the engine's own sampling, against the rules of its protocol.
    Takes about a second. Run it with parameters that make the sampler do something.

    Args:
        sampler: parameters, or a name known to `asyncinfer.plugins.samplers`.
        device: a torch device.

    Raises:
        RuleError: the first rule that is broken, with the smallest case found.
    """
    # Imports torch: who tests on a fake model needs none.
    from asyncinfer.testing.sampler_rules import RULES
    from asyncinfer.testing.sampler_trial import Trial

    try:
        plugin = plugins.samplers.resolve(sampler)
    except PluginError as error:
        if isinstance(sampler, str):
            raise
        raise RuleError("parameters", str(error)) from error
    trial = Trial(plugin, device)
    for name, rule in RULES.items():
        try:
            rule(trial)
        except RuleError:
            raise
        except AsyncInferError as error:
            raise RuleError(name, str(error)) from error
