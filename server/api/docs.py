"""The page at `/docs`: every endpoint and its fields, from the OpenAPI schema. It loads nothing from elsewhere."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from html import escape
from typing import Any

from fastapi import APIRouter, Request, Response

PATH = "/docs"

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; }
td, th { border-top: 1px solid #8884; padding: .2rem .6rem; text-align: left; vertical-align: top; }
@media (prefers-color-scheme: dark) { :root { color-scheme: dark; } }
"""
_HEADERS = {
    "content-type": "text/html; charset=utf-8",
    "content-security-policy": (
        "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        f"style-src 'sha256-{base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()}'"
    ),
    "x-content-type-options": "nosniff",
}
_BOUNDS = {
    "minimum": "≥ {}",
    "exclusiveMinimum": "> {}",
    "maximum": "≤ {}",
    "minLength": "at least {} characters",
    "maxLength": "at most {} characters",
    "minItems": "at least {} items",
    "maxItems": "at most {} items",
    "pattern": "matches {}",
}
_SCHEMAS = "#/components/schemas/"

router = APIRouter()


@router.get(PATH, include_in_schema=False)
async def docs(request: Request) -> Response:
    return Response(_page(request.app.openapi()), headers=_HEADERS)


def _page(api: Mapping[str, Any]) -> str:
    title = escape(f"{api['info']['title']} {api['info']['version']}")
    parts = [
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
        f"<h1>{title}</h1><p>A field that is null counts as not given; unknown fields are ignored. "
        'The same for programs: <a href="openapi.json">openapi.json</a></p>'
    ]
    for path, operations in api["paths"].items():
        for method, operation in operations.items():
            parts.append(f"<h2><code>{method.upper()} {escape(path)}</code></h2><p>{escape(operation['summary'])}</p>")
            body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
            if body is not None:
                parts.append(f"<p>Body: {_type(body)}</p>")
    for name, schema in api["components"]["schemas"].items():
        parts.append(f'<h2 id="{escape(name)}">{escape(name)}</h2><p>{escape(schema.get("description", ""))}</p>')
        parts.append(_table(schema))
    return "\n".join(parts)


def _table(schema: Mapping[str, Any]) -> str:
    required = schema.get("required", ())
    rows = "\n".join(
        f"<tr><td><code>{escape(name)}</code><td>{_type(field)}<td>{_default(field, required=name in required)}"
        for name, field in schema.get("properties", {}).items()
    )
    return f"<table><tr><th>field<th>type<th>default\n{rows}</table>"


def _type(schema: Any) -> str:
    """A field's type and bounds, as HTML."""
    if not isinstance(schema, dict):
        return "any"
    if (reference := schema.get("$ref")) is not None:
        name = escape(reference.removeprefix(_SCHEMAS))
        return f'<a href="#{name}">{name}</a>'
    if (kinds := schema.get("anyOf")) is not None:
        return " or ".join(_type(kind) for kind in kinds if kind != {"type": "null"})
    if (values := schema.get("enum", [schema["const"]] if "const" in schema else None)) is not None:
        return ", ".join(escape(json.dumps(value)) for value in values)
    kind = escape(str(schema.get("type", "any")))
    if kind == "array":
        kind = f"array of {_type(schema.get('items'))}"
    bounds = [escape(text.format(schema[key])) for key, text in _BOUNDS.items() if key in schema]
    return ", ".join([kind, *bounds])


def _default(field: Mapping[str, Any], *, required: bool) -> str:
    if required:
        return "required"
    return escape(json.dumps(field["default"])) if "default" in field else ""
