"""`/openapi.json` is OpenAPI 3.1 that says what the models say that check requests.

python -m tests.test_openapi    writes the file again that the dispatcher answers with
"""

import json
from collections.abc import Iterator
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from rollout_dispatcher.core.statistics import Statistics
from rollout_dispatcher.sample import DType
from rollout_dispatcher.service.config.values import RUN_HEADER
from rollout_dispatcher.service.http.plane import VERSION, CloseQuery, EndQuery
from rollout_dispatcher.service.http.samples import MAX_SAMPLES, PushRequest
from tests.support.source import ROOT

DOCUMENT = ROOT / "dispatcher/rollout_dispatcher/service/http/openapi.json"


class GroupPath(BaseModel):
    """Of `/v1/groups/ID/close`."""

    model_config = ConfigDict(use_attribute_docstrings=True)
    group_id: Annotated[str, Field(min_length=1)]
    """the group's id, as its samples say it"""


class PhasePath(BaseModel):
    """Of `/v1/phases/V/end`."""

    model_config = ConfigDict(use_attribute_docstrings=True)
    policy_version: Annotated[str, Field(pattern=VERSION.pattern)]
    """samples of older policy versions come no more"""


class ControlAnswer(BaseModel):
    """What closing a group, and ending a phase or the stream, is answered with."""

    model_config = ConfigDict(use_attribute_docstrings=True)
    waits_for: list[str]
    """producers whose word is still waited for"""


class ClientAnswer(BaseModel):
    """One client."""

    model_config = ConfigDict(use_attribute_docstrings=True)
    client_id: str
    """by default the host's name, the process id and a random part; over HTTP `http` and the host,
    whose producers are one client"""
    role: str
    """producer or rank"""
    dp_rank: int | None
    """of a rank"""
    host: str
    """the address that it connects from; empty of a Unix socket"""
    connected: bool
    """whether it is, over HTTP: whether it has pushed within half a minute; others went without a
    goodbye"""
    samples_accepted: int
    """since it has first connected to this process"""
    samples_per_second: float
    """accepted in about the last half minute"""
    last_error: str
    """why its last connection was lost, or a sample of it refused"""


class ClientsAnswer(BaseModel):
    """What `GET /v1/clients` is answered with."""

    model_config = ConfigDict(use_attribute_docstrings=True)
    clients: list[ClientAnswer]
    """in the order of their first connection"""


Described = dict[str, Any]

#: Where a schema is, by its name.
REF: Final = "#/components/schemas/{model}"
#: What any request may be answered with instead of what it asks for, by status.
ANY_ERROR: Final = {
    "401": "The token is missing or wrong",
    "403": "The token is for producers, and this is not for them",
    "409": f"The request names a run by {RUN_HEADER}, and another one is served; nothing was taken",
    "500": "The dispatcher has failed; its log says why",
    "503": "There is no place for this connection, or the dispatcher is not ready or shuts down",
}
#: What a push is answered with besides, by status.
PUSH_ERRORS: Final = {
    "400": "The body is no sample: message says where; nothing was taken",
    "408": "The request took longer than --set request-timeout to arrive",
    "413": "The body is larger than --set max-body-bytes; push fewer samples",
    "415": "The body is compressed",
    "503": "Nothing was taken: see code; with Retry-After, push it again. stopping: the "
    "dispatcher shuts down, its successor will take it; receiving: too much at once",
}
#: Where a push is answered sample by sample.
PUSH_OUTCOMES: Final = {
    "200": "All samples are accepted, or were before (duplicate)",
    "410": "The trainer has finished the run: nothing more is taken; reasons says run-finished",
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
    "required": ["outcomes", "errors", "reasons"],
    "properties": {
        "outcomes": {
            "type": "array",
            "description": "one a sample, in their order",
            "items": {"enum": ["accepted", "duplicate", "conflict", "refused", "full"]},
        },
        "errors": {
            "type": "object",
            "description": "message of each refused sample, by its index",
            "additionalProperties": {"type": "string"},
        },
        "reasons": {
            "type": "object",
            "description": "why in a stable word, likewise",
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
    ],
}


def describe() -> Described:
    """The document, but for the version."""
    schemas: Described = {"Tensor": TENSOR, "Error": ERROR, "PushAnswer": PUSH_ANSWER}
    schemas["DType"] = {"type": "string", "enum": [str(item) for item in DType]}
    for model in (PushRequest, ControlAnswer, ClientsAnswer):
        _add(schemas, model.__name__, model.model_json_schema(ref_template=REF))
    _add(schemas, "Status", _status())
    fields = schemas["PushRequest"]["properties"]["fields"]
    fields["additionalProperties"] = {"$ref": "#/components/schemas/Tensor"}
    return {
        "openapi": "3.1.0",
        "info": {"title": "rollout-dispatcher"},
        "paths": _paths(),
        "components": {
            "schemas": schemas,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"token": []}],
    }


def _status() -> Described:
    """The snapshot, without the histogram that is for /metrics, and with more beside it."""
    schema = TypeAdapter(Statistics).json_schema(ref_template=REF, mode="serialization")
    del schema["properties"]["lengths"]
    schema["required"].remove("lengths")
    time_of_day = {"type": "string", "format": "date-time"}
    schema["properties"]["oldest_arrival"] = {"anyOf": [time_of_day, {"type": "null"}]}
    schema["$defs"]["RankStatistics"]["properties"]["last_seen"] = time_of_day
    schema["$defs"]["StepStatistics"]["properties"]["planned_at"] = time_of_day
    return schema


def _add(schemas: Described, name: str, schema: Described) -> None:
    """A model's schema, and those of what it holds."""
    schemas |= schema.pop("$defs", {})
    schemas[name] = schema


def _paths() -> Described:
    return {
        "/v1/samples": {"post": _push()},
        "/v1/groups/{group_id}/close": {
            "post": _control("A group gets no further member", CloseQuery, GroupPath)
        },
        "/v1/phases/{policy_version}/end": {
            "post": _control("Nothing older comes any more", EndQuery, PhasePath)
        },
        "/v1/stream/end": {"post": _control("Nothing comes any more", EndQuery)},
        "/v1/clients": {"get": _get("Producers and DP ranks, and how they are", "ClientsAnswer")},
        "/": {"get": _get("The snapshot as a page, for a browser", text="text/html")},
        "/metrics": {"get": _get("Prometheus text format")},
        "/livez": {"get": _get("The process serves")},
        "/readyz": {"get": _get("Samples are accepted")},
        "/statusz": {"get": _get("A snapshot for a person", "Status")},
        "/openapi.json": {"get": _get("This description", "")},
    }


def _push() -> Described:
    body: Described = {"schema": {"$ref": REF.format(model=PushRequest.__name__)}}
    several = {"type": "array", "items": body["schema"], "maxItems": MAX_SAMPLES}
    one_or_more = {"schema": {"anyOf": [body["schema"], several]}}
    return {
        "summary": "Push finished samples",
        "description": f"One object, an array of them, or NDJSON; at most {MAX_SAMPLES} samples, "
        "and --set max-body-bytes in all. All samples of a request are read before the first is "
        "taken.",
        "requestBody": {
            "required": True,
            "content": {"application/json": one_or_more, "application/x-ndjson": body},
        },
        "responses": {
            **_errors(ANY_ERROR | PUSH_ERRORS),
            **{status: _answer(text, "PushAnswer") for status, text in PUSH_OUTCOMES.items()},
        },
    }


def _control(
    summary: str, query: type[BaseModel], path: type[BaseModel] | None = None
) -> Described:
    """It answers whose word is still waited for."""
    wrong = {"400": "The request is malformed", "422": "It cannot be so: message says why"}
    named = [] if path is None else list(_parameters(path, "path"))
    return {
        "summary": summary,
        "parameters": [*named, *_parameters(query, "query")],
        "responses": {
            "200": _answer("It is done", "ControlAnswer"), **_errors(ANY_ERROR | wrong),
        },
    }  # fmt: skip


def _parameters(model: type[BaseModel], place: str) -> Iterator[Described]:
    """From the model that checks them, as text has them: null is not allowed."""
    for name, schema in model.model_json_schema()["properties"].items():
        kinds = [kind for kind in schema.get("anyOf", [schema]) if kind.get("type") != "null"]
        texts = [kind for kind in kinds if kind.get("type") == "string"]
        yield {
            "name": name,
            "in": place,
            "required": place == "path",
            "description": " ".join(schema.get("description", "").split()),
            "schema": {
                key: value
                for key, value in (texts or kinds)[0].items()
                if key not in {"title", "default", "description"}
            },
        }


def _get(summary: str, schema: str | None = None, text: str = "text/plain") -> Described:
    """schema: of a JSON answer, empty for any; None: the answer is text."""
    kind = text if schema is None else "application/json"
    shape = {"$ref": f"#/components/schemas/{schema}"} if schema else {}
    found = {"description": summary, "content": {kind: {"schema": shape}}}
    return {"summary": summary, "responses": {"200": found, **_errors(ANY_ERROR)}}


def _errors(texts: dict[str, str]) -> Described:
    return {status: _answer(text, "Error") for status, text in texts.items()}


def _answer(text: str, schema: str) -> Described:
    content = {"schema": {"$ref": f"#/components/schemas/{schema}"}}
    return {"description": text, "content": {"application/json": content}}


def written() -> str:
    return json.dumps(describe(), indent=1) + "\n"


def test_the_document_is_what_the_models_say() -> None:
    assert DOCUMENT.read_text() == written()


if __name__ == "__main__":
    DOCUMENT.write_text(written())
