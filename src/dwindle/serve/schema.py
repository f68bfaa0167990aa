"""The schemas of requests and answers, for OpenAPI."""

from __future__ import annotations

from typing import Any


def _object(required: dict[str, Any], optional: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"type": "object", "properties": required | (optional or {}), "required": list(required)}


def _json(schema: dict[str, Any], description: str = "The answer") -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": schema}}}


_NUMBER, _INTEGER, _STRING = {"type": "number"}, {"type": "integer"}, {"type": "string"}
_BASE64 = {"type": "string", "contentEncoding": "base64", "minLength": 1}
_SETTINGS = {
    "budget": {"type": ["number", "null"], "exclusiveMinimum": 0, "maximum": 1},
    "top": {"type": "integer", "minimum": 1, "maximum": 100},
    "model": {"type": ["string", "null"]},
}
_ITEM = _object({"image": _BASE64}, _SETTINGS)
_CLASS = _object({"index": _INTEGER, "label": _STRING, "confidence": _NUMBER})
_ANSWER = {
    "model": _STRING,
    "top": {"type": "array", "items": _CLASS},
    "depth": _NUMBER,
    "gmacs": _NUMBER,
    "gmacs_static": _NUMBER,
    "cost": _NUMBER,
    "budget": {"type": ["number", "null"]},
}
_GRID = {"type": "array", "items": {"type": "array", "items": {"type": ["number", "null"]}}}
_EXPLAINED = _ANSWER | {
    "blocks": _INTEGER,
    "tokens": _INTEGER,
    "live": {"type": "array", "items": _INTEGER},
    "depths": _GRID,
    "plan": {"anyOf": [_GRID, {"type": "null"}]},
    "ms": _NUMBER,
    "static_ms": _NUMBER,
    "seen": _STRING,
}
_BYTES = {"schema": {"type": "string", "format": "binary"}}
_KINDS = ("image/jpeg", "image/png", "image/webp", "image/gif", "image/bmp", "application/octet-stream")

IMAGE_BODY = {
    "requestBody": {
        "required": True,
        "content": dict.fromkeys(_KINDS, _BYTES) | {"application/json": {"schema": _ITEM}},
    }
}
BATCH_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": _object({"images": {"type": "array", "items": _ITEM, "minItems": 1, "maxItems": 32}})
            }
        },
    }
}
ANSWER: dict[int | str, Any] = {200: _json(_object(_ANSWER))}
EXPLAINED: dict[int | str, Any] = {200: _json(_object(_EXPLAINED))}
BATCH: dict[int | str, Any] = {200: _json(_object({"results": {"type": "array", "items": {"type": "object"}}}))}
MODELS: dict[int | str, Any] = {200: _json(_object({"models": {"type": "array", "items": {"type": "object"}}}))}
SAMPLES: dict[int | str, Any] = {200: _json(_object({"samples": {"type": "array", "items": _STRING}}))}
HEALTH: dict[int | str, Any] = {
    200: _json(_object({"status": _STRING})),
    503: _json(_object({"status": _STRING}), "Going down"),
}
_ERROR = _object({"error": _STRING})
ERRORS: dict[int | str, Any] = {
    status: _json(_ERROR, why)
    for status, why in {
        400: "The request ended early or is not HTTP, or a number has more than 64 bits",
        401: "No, or a wrong, bearer token",
        403: "Asked by a page of another server",
        404: "No such model",
        408: "The body took too long",
        413: "Too many bytes or pixels",
        415: "The body is encoded",
        421: "Asked under a name that is not this server's",
        422: "Not an image, or settings out of range",
        429: "Too many images are waiting",
        431: "Too many or too long headers",
        503: "Shutting down, or too much to read at once",
        504: "No answer in time",
    }.items()
}
