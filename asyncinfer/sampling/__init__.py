from asyncinfer.sampling.history import TokenHistory
from asyncinfer.sampling.logprobs import row_logprobs, score_tokens
from asyncinfer.sampling.plugin_samplers import PluginCall, PluginSamplers
from asyncinfer.sampling.state import Sampled, SamplingState, draw_bytes
from asyncinfer.sampling.transfer import HostCopy, upload

__all__ = [
    "HostCopy",
    "PluginCall",
    "PluginSamplers",
    "Sampled",
    "SamplingState",
    "TokenHistory",
    "draw_bytes",
    "row_logprobs",
    "score_tokens",
    "upload",
]
