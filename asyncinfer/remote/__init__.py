"""An engine's replicas elsewhere: who gets a request, and how it travels."""

from asyncinfer.remote.router import ROUTINGS, Route, Router, Routing
from asyncinfer.remote.told import ToldPolicy

__all__ = ["ROUTINGS", "Route", "Router", "Routing", "ToldPolicy"]
