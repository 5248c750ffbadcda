"""What the engine finds on this machine: what it computes with, how fast, and what it does without
where something is missing or wrong."""

from asyncinfer.doctor.doctor import Report, examine_machine
from asyncinfer.doctor.machine import Machine
from asyncinfer.doctor.products import ProductTimes
from asyncinfer.doctor.trials import Trial

__all__ = [
    "Machine",
    "ProductTimes",
    "Report",
    "Trial",
    "examine_machine",
]
