from asyncinfer.sampling.apart import sample_apart, score_apart
from asyncinfer.sampling.history import TokenHistory
from asyncinfer.sampling.logprobs import pack_scores, row_logprobs, score_tokens
from asyncinfer.sampling.plugin_samplers import PluginCall, PluginSamplers
from asyncinfer.sampling.recorded import OPTION_WORDS, Draws, RecordedSampler, option_words
from asyncinfer.sampling.state import Sampled, SamplingState, draw_bytes
from asyncinfer.sampling.transfer import upload

__all__ = [
    "OPTION_WORDS",
    "Draws",
    "PluginCall",
    "PluginSamplers",
    "RecordedSampler",
    "Sampled",
    "SamplingState",
    "TokenHistory",
    "draw_bytes",
    "option_words",
    "pack_scores",
    "row_logprobs",
    "sample_apart",
    "score_apart",
    "score_tokens",
    "upload",
]
