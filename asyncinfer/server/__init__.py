"""An ASGI application that speaks the protocols of OpenAI and Anthropic. Needs the extra
`server`."""

from asyncinfer.server.app import create_app
from asyncinfer.server.keys import ApiKey

__all__ = ["ApiKey", "create_app"]
