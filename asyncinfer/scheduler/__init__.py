"""Which tokens of which sequences are computed in each step."""

from asyncinfer.scheduler.counters import SchedulerStats
from asyncinfer.scheduler.draft_model import DraftModel
from asyncinfer.scheduler.limits import check_fits, check_guided
from asyncinfer.scheduler.pace import FULL_STEPS, Pace
from asyncinfer.scheduler.policy import FCFS, POLICIES, Deadline, Priority
from asyncinfer.scheduler.row_logprobs import FIXED_WORDS, RowLogprobs
from asyncinfer.scheduler.scheduler import Scheduler
from asyncinfer.scheduler.sequence import ChosenSampler, Pooling, Sequence, SequenceState
from asyncinfer.scheduler.step import ForcedTokens, Join, PageChanges, Step
from asyncinfer.scheduler.step_runner import RunnerSpec, StepResult, StepRunner

__all__ = [
    "FCFS",
    "FIXED_WORDS",
    "FULL_STEPS",
    "POLICIES",
    "ChosenSampler",
    "Deadline",
    "DraftModel",
    "ForcedTokens",
    "Join",
    "Pace",
    "PageChanges",
    "Pooling",
    "Priority",
    "RowLogprobs",
    "RunnerSpec",
    "Scheduler",
    "SchedulerStats",
    "Sequence",
    "SequenceState",
    "Step",
    "StepResult",
    "StepRunner",
    "check_fits",
    "check_guided",
]
