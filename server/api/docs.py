"""The page at `/docs`: every endpoint, its fields and a form to try it, made from the OpenAPI schema.

It loads no external resources.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request, Response

from weft.server.api.ui import page_headers

PATH = "/docs"


def _read(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


_HEAD, _FORM, _STYLE = map(_read, ("docs_files/head.html", "docs_files/form.html", "docs_files/docs.css"))
_SCRIPT = "\n".join(map(_read, ("ui_files/api.js", "docs_files/docs.js")))
_HEADERS = page_headers(_STYLE, _SCRIPT)

_TEXT = "What is 12 + 30?"
_CHAT: dict[str, Any] = {"model": "MODEL", "messages": [{"role": "user", "content": _TEXT}]}
_ITEMS = {"items": [{"role": "user", "content": _TEXT}]}
_COMPLETION: dict[str, Any] = {"model": "MODEL", "prompt": "1 2 3 4"}
_RERANK: dict[str, Any] = {"model": "MODEL", "query": _TEXT, "documents": ["It is 42.", "Paris is in France."]}
_SCORE: dict[str, Any] = {"model": "MODEL", "text_1": _TEXT, "text_2": ["It is 42.", "Paris"]}
_INPUT: dict[str, Any] = {"model": "MODEL", "input": ["12 + 30"]}
EXAMPLES: dict[str, Any] = {
    "/v1/embeddings": {"input": ["The capital of France is Paris.", "12 + 30"]},
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), _RERANK),
    **dict.fromkeys(("/score", "/v1/score"), _SCORE),
    **dict.fromkeys(("/classify", "/pooling"), _INPUT),
    "/v1/completions": {**_COMPLETION, "max_tokens": 16},
    "/v1/chat/completions": {**_CHAT, "max_tokens": 64, "stream": True},
    "/v1/messages": {**_CHAT, "max_tokens": 64, "stream": True},
    "/v1/messages/count_tokens": _CHAT,
    "/v1/completions/render": _COMPLETION,
    "/v1/responses": {"model": "MODEL", "input": _TEXT, "max_output_tokens": 64},
    "/v1/responses/input_tokens": {"model": "MODEL", "input": _TEXT},
    "/v1/conversations": _ITEMS,
    "/v1/conversations/{id}/items": _ITEMS,
    "/v1/chat/completions/render": _CHAT,
    "/tokenize": {"model": "MODEL", "prompt": _TEXT},
    "/detokenize": {"model": "MODEL", "tokens": [5, 6, 7]},
    "/invocations": {**_COMPLETION, "max_tokens": 16},
    "/apply-template": _CHAT,
    "/completion": {"prompt": "1 2 3 4", "n_predict": 16},
    "/api/chat": _CHAT,
    "/api/generate": {"model": "MODEL", "prompt": _TEXT},
    "/api/embed": {"model": "MODEL", "input": "12 + 30"},
    "/api/embeddings": {"model": "MODEL", "prompt": "12 + 30"},
    "/api/show": {"model": "MODEL"},
}
"""Example bodies; MODEL is replaced by the served model. Other bodies are made from their required fields."""
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
    parts = [_HEAD.format(title=title, style=_STYLE)]
    for path, operations in api["paths"].items():
        for method, operation in operations.items():
            parts.append(f"<h2><code>{method.upper()} {escape(path)}</code></h2><p>{escape(operation['summary'])}</p>")
            body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
            if body is not None:
                parts.append(f"<p>Body: {_type(body)}</p>")
            parts.append(_form(method, path, body, api["components"]["schemas"]))
    for name, schema in api["components"]["schemas"].items():
        parts.append(f'<h2 id="{escape(name)}">{escape(name)}</h2><p>{escape(schema.get("description", ""))}</p>')
        parts.append(_table(schema))
    parts.append(f'<script type="module">{_SCRIPT}</script>')
    return "\n".join(parts)


def _form(method: str, path: str, body: Any, schemas: Mapping[str, Any]) -> str:
    """The form of an operation: path parameters, body and answer."""
    inputs = "".join(
        f'<label>{escape(name)} <input data-name="{escape(name)}" value="MODEL"></label>'
        for name in re.findall(r"\{(\w+)\}", path)
    )
    if body is not None:
        text = json.dumps(example(path, body, schemas), indent=2)
        rows = text.count("\n") + 1
        inputs += f'<textarea class="body" rows="{rows}" spellcheck="false" aria-label="Body">{escape(text)}</textarea>'
    return _FORM.format(method=method.upper(), path=escape(path), inputs=inputs)


def example(path: str, body: Mapping[str, Any], schemas: Mapping[str, Any]) -> Any:
    """An example body for the endpoint at `path` with the schema `body`."""
    if path in EXAMPLES:
        return EXAMPLES[path]
    schema = schemas.get(str(body.get("$ref", "")).removeprefix(_SCHEMAS), body)
    empty = {"string": "", "integer": 1, "number": 1.0, "boolean": False, "array": [], "object": {}}
    fields = schema.get("properties", {})
    return {name: empty.get(fields.get(name, {}).get("type")) for name in schema.get("required", ())}


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
