"""Which tokens of which requests are computed in each step."""

from asyncinfer.scheduler.limits import check_fits
from asyncinfer.scheduler.output import StepOutput
from asyncinfer.scheduler.plan import (
    ChosenSampler,
    Join,
    PageChanges,
    RunnerSpec,
    StepPlan,
    StepResult,
    StepRunner,
)
from asyncinfer.scheduler.policy import FCFS, POLICIES, Deadline, Priority
from asyncinfer.scheduler.request import Request, RequestState
from asyncinfer.scheduler.row_logprobs import FIXED_WORDS, RowLogprobs
from asyncinfer.scheduler.scheduler import Scheduler

__all__ = [
    "FCFS",
    "FIXED_WORDS",
    "POLICIES",
    "ChosenSampler",
    "Deadline",
    "Join",
    "PageChanges",
    "Priority",
    "Request",
    "RequestState",
    "RowLogprobs",
    "RunnerSpec",
    "Scheduler",
    "StepOutput",
    "StepPlan",
    "StepResult",
    "StepRunner",
    "check_fits",
]
