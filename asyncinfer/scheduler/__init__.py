"""Which tokens of which sequences are computed in each step."""

from asyncinfer.scheduler.counters import SchedulerStats
from asyncinfer.scheduler.limits import check_fits
from asyncinfer.scheduler.policy import FCFS, POLICIES, Deadline, Priority
from asyncinfer.scheduler.row_logprobs import FIXED_WORDS, RowLogprobs
from asyncinfer.scheduler.scheduler import Scheduler
from asyncinfer.scheduler.sequence import ChosenSampler, Sequence, SequenceState
from asyncinfer.scheduler.step import Join, PageChanges, Step
from asyncinfer.scheduler.step_runner import RunnerSpec, StepResult, StepRunner

__all__ = [
    "FCFS",
    "FIXED_WORDS",
    "POLICIES",
    "ChosenSampler",
    "Deadline",
    "Join",
    "PageChanges",
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
]
