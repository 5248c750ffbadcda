"""Replicas of an engine in other processes: which one a request goes to, and how it gets there."""

from asyncinfer.remote.engine import RemoteEngine
from asyncinfer.remote.link import Link, ReplicaLost
from asyncinfer.remote.replica import Replica
from asyncinfer.remote.router import ROUTINGS, Route, Router, Routing
from asyncinfer.remote.stream import RemoteStream
from asyncinfer.remote.told import ToldPolicy

__all__ = [
    "ROUTINGS",
    "Link",
    "RemoteEngine",
    "RemoteStream",
    "Replica",
    "ReplicaLost",
    "Route",
    "Router",
    "Routing",
    "ToldPolicy",
]
