"""The protocols that plugins implement."""

from asyncinfer.params import check_integer, check_real
from asyncinfer.protocols.eviction import (
    EVICTION_PROTOCOL_VERSION,
    CachedBlock,
    CapacityAware,
    ConversationAware,
    ConversationState,
    EvictionPolicy,
)
from asyncinfer.protocols.model import MODEL_PROTOCOL_VERSION, ModelFamily
from asyncinfer.protocols.observer import (
    OBSERVER_PROTOCOL_VERSION,
    EngineEnded,
    EngineOpened,
    EventsDropped,
    FirstToken,
    Observer,
    ObserverEvent,
    RequestEnded,
    RequestPreempted,
    RequestStarted,
    RequestSubmitted,
    StepTaken,
)
from asyncinfer.protocols.proposer import (
    PROPOSER_PROTOCOL_VERSION,
    DraftRequest,
    Proposer,
)
from asyncinfer.protocols.sampler import (
    SAMPLER_PROTOCOL_VERSION,
    Sampler,
    SamplerPlugin,
    SamplerStep,
)
from asyncinfer.protocols.scheduling import (
    SCHEDULING_PROTOCOL_VERSION,
    RequestView,
    SchedulingPolicy,
)

__all__ = [
    "EVICTION_PROTOCOL_VERSION",
    "MODEL_PROTOCOL_VERSION",
    "OBSERVER_PROTOCOL_VERSION",
    "PROPOSER_PROTOCOL_VERSION",
    "SAMPLER_PROTOCOL_VERSION",
    "SCHEDULING_PROTOCOL_VERSION",
    "CachedBlock",
    "CapacityAware",
    "ConversationAware",
    "ConversationState",
    "DraftRequest",
    "EngineEnded",
    "EngineOpened",
    "EventsDropped",
    "EvictionPolicy",
    "FirstToken",
    "ModelFamily",
    "Observer",
    "ObserverEvent",
    "Proposer",
    "RequestEnded",
    "RequestPreempted",
    "RequestStarted",
    "RequestSubmitted",
    "RequestView",
    "Sampler",
    "SamplerPlugin",
    "SamplerStep",
    "SchedulingPolicy",
    "StepTaken",
    "check_integer",
    "check_real",
]
