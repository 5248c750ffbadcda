"""The clients of OpenAI and Anthropic on an engine in this process."""

from asyncinfer.clients.anthropic import anthropic_client, sync_anthropic_client
from asyncinfer.clients.openai import openai_client, sync_openai_client
from asyncinfer.clients.wiring import in_process_transport

__all__ = [
    "anthropic_client",
    "in_process_transport",
    "openai_client",
    "sync_anthropic_client",
    "sync_openai_client",
]
