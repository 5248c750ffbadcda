"""`check_sampler`: whether a sampler plugin keeps the rules, and which one it breaks."""

from __future__ import annotations

from asyncinfer import plugins
from asyncinfer.errors import AsyncInferError, PluginError
from asyncinfer.protocols import SamplerPlugin
from asyncinfer.testing.patience import with_patience
from asyncinfer.testing.rule_error import RuleError

__all__ = ["check_sampler"]


def check_sampler(
    sampler: SamplerPlugin | str, *, device: str = "cpu", patience: float = 30.0
) -> None:
    """Run a sampler plugin, through the engine's own sampling, against the rules of its protocol.
    Takes about a second. Run it with parameters that make the sampler do something.

    The rules: parameters are a frozen dataclass that JSON can hold, and stay as they are
    (*parameters*); calls return (*returns*) and are quick enough (*time*); any logits give a usable
    answer (*answers*); random generators and other settings of the process are left alone
    (*chance*, *answers*); a row's answer depends neither on others (*batch*, *n*) nor on steps
    without it (*pause*), nor on who had the slot before (*reuse*), nor on a preemption
    (*preemption*); bars hold (*bars*); what is declared is so (*argmax*, *draws*, *speculation*);
    steps take as many operations for many rows as for few (*rows*), wait for no device (*device*)
    and leave nothing behind (*memory*).

    Args:
        sampler: parameters, or a name known to `asyncinfer.plugins.samplers`.
        device: a torch device.
        patience: seconds; a call that takes longer is taken for one that never returns.

    Raises:
        RuleError: the first rule that is broken, with the smallest case found.
    """
    with_patience(lambda: _check(sampler, device), patience)


def _check(sampler: SamplerPlugin | str, device: str) -> None:
    # Imported here, since tests on a fake model need no torch.
    from asyncinfer.testing.sampler_rules import RULES
    from asyncinfer.testing.sampler_trial import SamplerTrial

    try:
        plugin = plugins.samplers.resolve(sampler)
    except PluginError as error:
        if isinstance(sampler, str):
            raise
        raise RuleError("parameters", str(error)) from error
    trial = SamplerTrial(plugin, device)
    for name, rule in RULES.items():
        try:
            rule(trial)
        except RuleError:
            raise
        except AsyncInferError as error:
            raise RuleError(name, str(error)) from error
