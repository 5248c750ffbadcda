from asyncinfer.sampling.guidance import guide
from asyncinfer.sampling.history import TokenHistory
from asyncinfer.sampling.logprobs import pack_scores, row_logprobs, score_tokens
from asyncinfer.sampling.per_row import sample_per_row, score_per_row
from asyncinfer.sampling.plugin_call import PluginCall
from asyncinfer.sampling.plugin_samplers import PluginSamplers
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
    "guide",
    "option_words",
    "pack_scores",
    "row_logprobs",
    "sample_per_row",
    "score_per_row",
    "score_tokens",
    "upload",
]
