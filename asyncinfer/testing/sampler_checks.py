"""`check_sampler`: whether a sampler plugin keeps the rules, and which one it breaks."""

from __future__ import annotations

from asyncinfer import plugins
from asyncinfer.errors import AsyncInferError, PluginError
from asyncinfer.protocols import SamplerPlugin
from asyncinfer.testing.rule_error import SamplerRuleError

__all__ = ["check_sampler"]


def check_sampler(sampler: SamplerPlugin | str, *, device: str = "cpu") -> None:
    """Run a sampler plugin, through the engine's own sampling, against the rules of its protocol.
    Takes about a second. Run it with parameters that make the sampler do something.

    Args:
        sampler: parameters, or a name known to `asyncinfer.plugins.samplers`.
        device: a torch device.

    Raises:
        SamplerRuleError: the first rule that is broken, with the smallest case found.
    """
    # Imports torch: who tests on a fake model needs none.
    from asyncinfer.testing.sampler_rules import RULES

    try:
        plugin = plugins.samplers.resolve(sampler)
    except PluginError as error:
        if isinstance(sampler, str):
            raise
        raise SamplerRuleError(f"parameters: {error}") from error
    for name, rule in RULES.items():
        try:
            rule(plugin, device)
        except SamplerRuleError:
            raise
        except AsyncInferError as error:
            raise SamplerRuleError(f"{name}: {error}") from error
