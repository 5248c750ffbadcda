"""Tools that a model may call: how families of models write calls, their parsers and grammars."""

from asyncinfer.tools.chat_options import ChatOptions
from asyncinfer.tools.delimiters import (
    FURTHER_MARKS,
    Delimiters,
    Detokenizes,
    MarkingDetokenizer,
)
from asyncinfer.tools.fallback import without_tools
from asyncinfer.tools.families import family_of, response_notes
from asyncinfer.tools.family import ToolFamily
from asyncinfer.tools.message import MessageParser, MessageReader, message_text
from asyncinfer.tools.output import MessageDelta
from asyncinfer.tools.tool import Tool

__all__ = [
    "FURTHER_MARKS",
    "ChatOptions",
    "Delimiters",
    "Detokenizes",
    "MarkingDetokenizer",
    "MessageDelta",
    "MessageParser",
    "MessageReader",
    "Tool",
    "ToolFamily",
    "family_of",
    "message_text",
    "response_notes",
    "without_tools",
]
