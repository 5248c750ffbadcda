"""Text: tokenizer, incremental detokenizer, stop strings, chat templates. No torch."""

from asyncinfer.text.chat import ChatTemplate
from asyncinfer.text.detokenizer import Detokenizer
from asyncinfer.text.gguf import gguf_template, gguf_tokenizer
from asyncinfer.text.panic import panicked
from asyncinfer.text.stop import StopChain, StopStrings, TextStop
from asyncinfer.text.tokenizer import Tokenizer

__all__ = [
    "ChatTemplate",
    "Detokenizer",
    "StopChain",
    "StopStrings",
    "TextStop",
    "Tokenizer",
    "gguf_template",
    "gguf_tokenizer",
    "panicked",
]
