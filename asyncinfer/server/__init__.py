"""An ASGI application that speaks the protocols of OpenAI and Anthropic. Needs the extra
`server`."""

from asyncinfer.server.app import create_app
from asyncinfer.server.hosts import check_hosts, check_origins
from asyncinfer.server.keys import ApiKey, check_key
from asyncinfer.server.models import Served

__all__ = ["ApiKey", "Served", "check_hosts", "check_key", "check_origins", "create_app"]
