"""For tests of the engine, of applications that embed it, and of plugins.

Also the types that a fake runner needs: the step that it is handed, its result, a tokenizer.
"""

from asyncinfer.cache import KVGroupSpec
from asyncinfer.scheduler import (
    Join,
    PageChanges,
    RunnerSpec,
    Sequence,
    Step,
    StepResult,
    StepRunner,
)
from asyncinfer.testing.cache_harness import CacheHarness, CacheRequest
from asyncinfer.testing.clocked import ClockedModel
from asyncinfer.testing.fake_engine import FakeModel
from asyncinfer.testing.fake_model import FakeRunner
from asyncinfer.testing.family_cases import FamilyReport
from asyncinfer.testing.family_checks import check_family
from asyncinfer.testing.gate import StepGate
from asyncinfer.testing.inline import InlineEngine, InlineStream
from asyncinfer.testing.invariants import InvariantError, check_invariants
from asyncinfer.testing.observer_checks import check_observer
from asyncinfer.testing.policy_checks import check_cache_policy
from asyncinfer.testing.policy_cost import policy_cost
from asyncinfer.testing.random_model import RandomModel
from asyncinfer.testing.rule_error import RuleError
from asyncinfer.testing.sampler_checks import check_sampler
from asyncinfer.testing.sampler_cost import SamplerCase, sampler_costs
from asyncinfer.testing.scenarios import simulate_scheduler
from asyncinfer.testing.scheduler_checks import check_scheduler
from asyncinfer.testing.scripted_model import Said, ScriptedModel
from asyncinfer.testing.simulation import Simulation
from asyncinfer.testing.simulator import SimulationReport, SimulationTrace, simulate
from asyncinfer.text import ChatTemplate, Tokenizer

__all__ = [
    "CacheHarness",
    "CacheRequest",
    "ChatTemplate",
    "ClockedModel",
    "FakeModel",
    "FakeRunner",
    "FamilyReport",
    "InlineEngine",
    "InlineStream",
    "InvariantError",
    "Join",
    "KVGroupSpec",
    "PageChanges",
    "RandomModel",
    "RuleError",
    "RunnerSpec",
    "Said",
    "SamplerCase",
    "ScriptedModel",
    "Sequence",
    "Simulation",
    "SimulationReport",
    "SimulationTrace",
    "Step",
    "StepGate",
    "StepResult",
    "StepRunner",
    "Tokenizer",
    "check_cache_policy",
    "check_family",
    "check_invariants",
    "check_observer",
    "check_sampler",
    "check_scheduler",
    "policy_cost",
    "sampler_costs",
    "simulate",
    "simulate_scheduler",
]
