"""Random lives of an engine in virtual time, every token and every wait checked."""

from asyncinfer.testing.simulator.campaign import SimulationReport, live, simulate
from asyncinfer.testing.simulator.trace import SimulationTrace

__all__ = ["SimulationReport", "SimulationTrace", "live", "simulate"]
