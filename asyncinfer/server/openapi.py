"""The OpenAPI document."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

from asyncinfer.server.fields import Fields

__all__ = ["Operation", "document"]


@dataclass(frozen=True, slots=True)
class Operation:
    """A path and its method."""

    method: str
    path: str
    about: str
    #: Fields of its body.
    fields: Fields = field(default_factory=Fields)
    #: Whether it needs no key.
    free: bool = False


def document(operations: Sequence[Operation]) -> dict[str, Any]:
    """The document, by OpenAPI 3.1."""
    paths: dict[str, dict[str, Any]] = {}
    for each in operations:
        paths.setdefault(each.path, {})[each.method.lower()] = _operation(each)
    return {
        "openapi": "3.1.0",
        "info": {"title": "asyncinfer", "version": version("asyncinfer")},
        "paths": paths,
        "components": {
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            "schemas": {"Error": _ERROR},
        },
    }


_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def _operation(operation: Operation) -> dict[str, Any]:
    failed = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    described: dict[str, Any] = {
        "summary": operation.about,
        "responses": {
            "200": {"description": "The answer."},
            "default": {"description": "An error.", "content": failed},
        },
    }
    if "{model}" in operation.path:
        place = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
        described["parameters"] = [place]
    if not operation.free:
        described["security"] = [{"key": []}, {}]
    if operation.fields:
        schema = {
            "type": "object",
            "required": [*operation.fields.required],
            "properties": {
                each.name: {**each.schema, "description": each.about} for each in operation.fields
            },
            "additionalProperties": False,
        }
        content = {"application/json": {"schema": schema}}
        described["requestBody"] = {"required": True, "content": content}
    return described
