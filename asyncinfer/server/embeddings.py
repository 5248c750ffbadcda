"""`/v1/embeddings`."""

from __future__ import annotations

from base64 import b64encode
from typing import Any, Final

from asyncinfer.bounds import MAX_EMBEDDED
from asyncinfer.errors import InvalidRequest, renaming
from asyncinfer.server.call import Call
from asyncinfer.server.completions import prompts_of
from asyncinfer.server.fields import (
    ANY,
    BOOLEAN,
    INTEGER,
    STRING,
    Field,
    Fields,
    check_fields,
    options_of,
)
from asyncinfer.server.models import Models
from asyncinfer.server.usage import request_options

__all__ = ["EMBEDDINGS", "NAMES", "EmbeddingsEndpoint"]

EMBEDDINGS: Final = Fields(
    Field("input", ANY, "A text, token ids, or a list of either.", required=True),
    Field("model", STRING, "A name that /v1/models lists; without it, the first."),
    Field("encoding_format", STRING, "`float`, or `base64` of little-endian float32."),
    Field("dimensions", INTEGER, "The first ones alone.", "dimensions"),
    Field("pooling", STRING, "`last` token or `mean` of all.", "pooling"),
    Field("normalize", BOOLEAN, "To length 1.", "normalize"),
    Field("prompt_name", STRING, "The model's prompt to put before each text.", "prompt_name"),
    Field("user", ANY, "Taken, and without effect."),
)
#: Arguments of `Engine.embed` -> the request's names of them.
NAMES: Final = {"texts": "input"}


class EmbeddingsEndpoint:
    """Embeds one text or several."""

    def __init__(self, models: Models) -> None:
        self._models = models

    async def __call__(self, call: Call) -> None:
        body = call.body
        check_fields(body, EMBEDDINGS)
        model = self._models.find(body.get("model"))
        texts = prompts_of("input", body["input"], MAX_EMBEDDED)
        form = body.get("encoding_format", "float")
        if form not in ("float", "base64"):
            raise InvalidRequest("encoding_format", form, "must be float or base64")
        options = options_of(body, EMBEDDINGS)
        # A text that is no entry of a list has no place in one.
        with renaming("texts" if texts is body["input"] else "texts[0]", "input"):
            done = await model.engine.embed(texts, **options, **request_options(call, model))
        usage = {"prompt_tokens": done.prompt_tokens, "total_tokens": done.prompt_tokens}

        def answer() -> dict[str, Any]:
            data = []
            for index, vector in enumerate(done.vectors):
                plain = form == "float"
                told = vector.tolist() if plain else b64encode(vector.astype("<f4")).decode()
                data.append({"object": "embedding", "index": index, "embedding": told})
            return {"object": "list", "data": data, "model": model.name, "usage": usage}

        await call.made(8 * sum(map(len, done.vectors)), answer)
