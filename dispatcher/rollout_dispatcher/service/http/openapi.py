"""What `/openapi.json` says: OpenAPI 3.1, from the same model that checks requests."""

from typing import Any, Final

from rollout_dispatcher import __version__
from rollout_dispatcher.sample import DType
from rollout_dispatcher.service.http.bodies.encoding import SUPPORTED
from rollout_dispatcher.service.http.bodies.samples import MAX_SAMPLES, PushRequest

Described = dict[str, Any]

#: What any request may be answered with instead of what it asks for, by status.
ANY_ERROR: Final = {
    "401": "The token is missing or wrong",
    "500": "The dispatcher has failed; its log says why",
    "503": "There is no place for this connection, or the dispatcher is not ready or shuts down",
}
#: What a push is answered with besides, by status.
PUSH_ERRORS: Final = {
    "400": "The body is no sample: message says where; nothing was taken",
    "408": "The request took longer than --request-timeout to arrive",
    "413": "The body is larger than --max-body-bytes, as sent or decompressed; push fewer samples",
    "415": f"The Content-Encoding is none of: {SUPPORTED}",
    "503": "Nothing was taken: see code; with Retry-After, push it again. stopping: the "
    "dispatcher shuts down, its successor will take it; receiving, busy: too much at once",
}
#: Where a push is answered sample by sample.
PUSH_OUTCOMES: Final = {
    "200": "All samples are accepted, or were before (duplicate)",
    "422": "A sample is refused; errors says why",
    "429": "A cap is reached; push the samples marked full again, after Retry-After seconds",
}
_INTEGER: Final = {"type": ["integer", "null"], "minimum": 0}
ERROR: Final[Described] = {
    "type": "object",
    "description": "Every status of 400 and above but a push's outcomes, whatever path it is for",
    "required": ["code", "message"],
    "properties": {
        "code": {"type": "string", "description": "a stable word for why"},
        "message": {"type": "string", "description": "what is wrong and what to do about it"},
    },
}
PUSH_ANSWER: Final[Described] = {
    "type": "object",
    "required": ["outcomes", "errors"],
    "properties": {
        "outcomes": {
            "type": "array",
            "description": "one a sample, in their order",
            "items": {"enum": ["accepted", "duplicate", "refused", "full"]},
        },
        "errors": {
            "type": "object",
            "description": "message of each refused sample, by its index",
            "additionalProperties": {"type": "string"},
        },
        "policy_version": _INTEGER | {"description": "of the trainer, as it reported it last"},
        "expected_version": _INTEGER
        | {"description": "that a sample pushed now is trained with, if they go in order"},
        "staleness": _INTEGER
        | {"description": "of the oldest of these samples by now, in policy versions"},
        "max_staleness": _INTEGER
        | {"description": "that a sample may have to be trained on; null: any"},
        "remaining": _INTEGER
        | {"description": "samples, or groups where steps are counted so, that may come in"},
    },
}
TENSOR: Final[Described] = {
    "description": "a number, arrays of numbers or booleans, or an object that says its type",
    "anyOf": [
        {"type": ["number", "boolean", "array"]},
        {
            "type": "object",
            "required": ["dtype", "data"],
            "properties": {"dtype": {"$ref": "#/components/schemas/DType"}, "data": {}},
        },
        {
            "type": "object",
            "description": "its memory: little endian, the last dimension first",
            "required": ["dtype", "shape", "base64"],
            "properties": {
                "dtype": {"$ref": "#/components/schemas/DType"},
                "shape": {"type": "array", "items": {"type": "integer", "minimum": 0}},
                "base64": {"type": "string", "contentEncoding": "base64"},
            },
        },
    ],
}


def describe() -> Described:
    """The document."""
    schema = PushRequest.model_json_schema(ref_template="#/components/schemas/{model}")
    definitions = schema.pop("$defs", {})
    schema["properties"]["fields"]["additionalProperties"] = {"$ref": "#/components/schemas/Tensor"}
    dtypes = {"type": "string", "enum": [str(item) for item in DType]}
    schemas = {
        "PushRequest": schema, "PushAnswer": PUSH_ANSWER, "Tensor": TENSOR, "DType": dtypes,
        "Error": ERROR, **definitions,
    }  # fmt: skip
    return {
        "openapi": "3.1.0",
        "info": {"title": "rollout-dispatcher", "version": __version__},
        "paths": {
            "/v1/samples": {"post": _push()},
            "/v1/groups/{group_id}/close": {"post": _control("A group gets no further member")},
            "/v1/phases/{policy_version}/end": {"post": _control("Nothing older comes any more")},
            "/v1/stream/end": {"post": _control("Nothing comes any more")},
            "/metrics": {"get": _get("Prometheus text format", "text/plain")},
            "/livez": {"get": _get("The process serves", "text/plain")},
            "/readyz": {"get": _get("Samples are accepted", "text/plain")},
            "/statusz": {"get": _get("A snapshot for a person", "application/json")},
            "/debug/steps": {"get": _get("The last steps, as they went", "application/json")},
            "/openapi.json": {"get": _get("This description", "application/json")},
        },
        "components": {"schemas": schemas},
    }


def _push() -> Described:
    wait = {
        "name": "wait",
        "in": "query",
        "schema": {"type": "string", "examples": ["500ms", "5s"]},
        "description": "how long the request may be held while a cap is reached, at most "
        "--request-timeout; without it a push that finds no room is answered 429 at once",
    }
    body = {"schema": {"$ref": "#/components/schemas/PushRequest"}}
    return {
        "summary": "Push finished samples",
        "description": f"One object, an array of them, or NDJSON; at most {MAX_SAMPLES} samples, "
        "and --max-body-bytes in all. It may be compressed with "
        f"{SUPPORTED}. All samples of a request are read before the first is taken.",
        "parameters": [wait],
        "requestBody": {
            "required": True,
            "content": {"application/json": body, "application/x-ndjson": body},
        },
        "responses": {
            **_errors(ANY_ERROR | PUSH_ERRORS),
            **{status: _answer(text, "PushAnswer") for status, text in PUSH_OUTCOMES.items()},
        },
    }


def _control(summary: str) -> Described:
    """It answers whose word is still waited for."""
    names = {"type": "array", "items": {"type": "string"}}
    content = {"schema": {"type": "object", "properties": {"waits_for": names}}}
    said = {"description": "It is heard", "content": {"application/json": content}}
    wrong = {"400": "The request is malformed", "422": "It cannot be so: message says why"}
    return {"summary": summary, "responses": {"200": said, **_errors(ANY_ERROR | wrong)}}


def _get(summary: str, kind: str) -> Described:
    found = {"description": summary, "content": {kind: {"schema": {}}}}
    return {"summary": summary, "responses": {"200": found, **_errors(ANY_ERROR)}}


def _errors(texts: dict[str, str]) -> Described:
    return {status: _answer(text, "Error") for status, text in texts.items()}


def _answer(text: str, schema: str) -> Described:
    content = {"schema": {"$ref": f"#/components/schemas/{schema}"}}
    return {"description": text, "content": {"application/json": content}}
