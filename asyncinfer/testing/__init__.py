"""For tests of the engine, of applications that embed it, and of plugins."""

from asyncinfer.testing.fake_engine import FakeModel
from asyncinfer.testing.fake_model import FakeRunner
from asyncinfer.testing.gate import StepGate
from asyncinfer.testing.inline import InlineEngine, InlineStream

__all__ = ["FakeModel", "FakeRunner", "InlineEngine", "InlineStream", "StepGate"]
