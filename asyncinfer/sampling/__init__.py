from asyncinfer.sampling.history import TokenHistory
from asyncinfer.sampling.logprobs import row_logprobs, score_tokens
from asyncinfer.sampling.state import Sampled, SamplingState
from asyncinfer.sampling.transfer import HostCopy, upload

__all__ = [
    "HostCopy",
    "Sampled",
    "SamplingState",
    "TokenHistory",
    "row_logprobs",
    "score_tokens",
    "upload",
]
