"""What an answer has to fit: formats compiled to matchers, and the masks that these give."""

from asyncinfer.grammar.compiler import GrammarCompiler
from asyncinfer.grammar.counters import GrammarCounters
from asyncinfer.grammar.endless import check_ends
from asyncinfer.grammar.masks import allowed_ids, fill_masks, mask_words
from asyncinfer.grammar.matcher import Matcher
from asyncinfer.grammar.places import check_values
from asyncinfer.grammar.reasoning import Reasoning
from asyncinfer.grammar.stop_regex import StopRegex, compile_stop

__all__ = [
    "GrammarCompiler",
    "GrammarCounters",
    "Matcher",
    "Reasoning",
    "StopRegex",
    "allowed_ids",
    "check_ends",
    "check_values",
    "compile_stop",
    "fill_masks",
    "mask_words",
]
