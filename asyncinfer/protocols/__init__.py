"""What a plugin implements."""

from asyncinfer.protocols.eviction import EVICTION_PROTOCOL_VERSION, CachedBlock, EvictionPolicy
from asyncinfer.protocols.scheduling import (
    SCHEDULING_PROTOCOL_VERSION,
    RequestView,
    SchedulingPolicy,
)

__all__ = [
    "EVICTION_PROTOCOL_VERSION",
    "SCHEDULING_PROTOCOL_VERSION",
    "CachedBlock",
    "EvictionPolicy",
    "RequestView",
    "SchedulingPolicy",
]
