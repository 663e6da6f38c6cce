"""What `/openapi.json` says: OpenAPI 3.1, from the same model that checks requests."""

from typing import Final

from rollout_dispatcher import __version__
from rollout_dispatcher.service.http.bodies.encoding import SUPPORTED
from rollout_dispatcher.service.http.bodies.samples import MAX_SAMPLES, PushRequest

#: What a push is answered with, by status.
PUSH_ANSWERS: Final = {
    "400": "The body is no sample: message says where; nothing was taken",
    "401": "The token is missing or wrong",
    "408": "The request took longer than --request-timeout to arrive",
    "413": "The body is larger than --max-body-bytes, as sent or decompressed; push fewer samples",
    "415": f"The Content-Encoding is none of: {SUPPORTED}",
    "422": "A sample is refused; errors says why",
    "429": "A cap is reached; push the samples marked full again",
    "503": "Nothing was taken: see code; with Retry-After, push it again. stopping: the "
    "dispatcher shuts down, its successor will take it; receiving, busy: too much at once",
}


def describe() -> dict[str, object]:
    """The document."""
    schema = PushRequest.model_json_schema(ref_template="#/components/schemas/{model}")
    definitions = schema.pop("$defs", {})
    text = {"description": "Plain text", "content": {"text/plain": {"schema": {"type": "string"}}}}
    answer = {"description": "Outcome of each sample", "content": {"application/json": {}}}
    push = {
        "summary": "Push finished samples",
        "description": f"One object, an array of them, or NDJSON; at most {MAX_SAMPLES} samples, "
        "and --max-body-bytes in all. It may be compressed with "
        f"{SUPPORTED}. All samples of a request are read before the first is taken.",
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {"schema": {"$ref": "#/components/schemas/PushRequest"}},
                "application/x-ndjson": {"schema": {"$ref": "#/components/schemas/PushRequest"}},
            },
        },
        "responses": {
            "200": answer,
            **{status: {"description": text} for status, text in PUSH_ANSWERS.items()},
        },
    }
    gets = {path: {"get": {"responses": {"200": text}}} for path in ("/metrics", "/livez")}
    return {
        "openapi": "3.1.0",
        "info": {"title": "rollout-dispatcher", "version": __version__},
        "paths": {"/v1/samples": {"post": push}, **gets},
        "components": {"schemas": {"PushRequest": schema, **definitions}},
    }
