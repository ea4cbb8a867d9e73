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

from weft.server.api.ui import source_of

PATH = "/docs"

_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; overflow-wrap: anywhere; }
td, th { border-top: 1px solid #8884; padding: .2rem .6rem; text-align: left; vertical-align: top; }
h2 { margin: 2rem 0 .2rem; overflow-wrap: anywhere; }
h2 + p { margin-top: 0; }
summary { cursor: pointer; width: max-content; }
form { display: grid; gap: .5rem; margin: .5rem 0; }
textarea, input { font: .9rem/1.4 ui-monospace, monospace; width: 100%; box-sizing: border-box; padding: .4rem; }
button { font: inherit; padding: .2rem .9rem; cursor: pointer; }
pre { overflow: auto; max-height: 24rem; padding: .6rem; border: 1px solid #8886; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; }
.row { display: flex; gap: .5rem; flex-wrap: wrap; align-items: center; }
.status { min-height: 1.5em; margin: 0; }
.error { color: light-dark(#c02626, #ff8a80); }
[hidden] { display: none; }
"""
_FOLDER = Path(__file__).parent
_SCRIPT = "\n".join((_FOLDER / name).read_text(encoding="utf-8") for name in ("ui_files/api.js", "docs_files/docs.js"))


_HEADERS = {
    "content-type": "text/html; charset=utf-8",
    "content-security-policy": (
        "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; connect-src 'self'; "
        "require-trusted-types-for 'script'; trusted-types 'none'; "
        f"style-src {source_of(_STYLE)}; script-src {source_of(_SCRIPT)}"
    ),
    "cache-control": "no-cache",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
EXAMPLES: dict[str, Any] = {
    "/v1/embeddings": {"input": ["The capital of France is Paris.", "12 + 30"]},
    "/v1/completions": {"model": "MODEL", "prompt": "1 2 3 4", "max_tokens": 16},
    "/v1/chat/completions": {
        "model": "MODEL",
        "messages": [{"role": "user", "content": "What is 12 + 30?"}],
        "max_tokens": 64,
        "stream": True,
    },
    "/v1/messages": {
        "model": "MODEL",
        "messages": [{"role": "user", "content": "What is 12 + 30?"}],
        "max_tokens": 64,
        "stream": True,
    },
    "/v1/messages/count_tokens": {"model": "MODEL", "messages": [{"role": "user", "content": "What is 12 + 30?"}]},
    "/v1/completions/render": {"model": "MODEL", "prompt": "1 2 3 4"},
    "/v1/responses": {"model": "MODEL", "input": "What is 12 + 30?", "max_output_tokens": 64},
    "/v1/responses/input_tokens": {"model": "MODEL", "input": "What is 12 + 30?"},
    "/v1/conversations": {"items": [{"role": "user", "content": "What is 12 + 30?"}]},
    "/v1/conversations/{id}/items": {"items": [{"role": "user", "content": "What is 12 + 30?"}]},
    "/v1/chat/completions/render": {"model": "MODEL", "messages": [{"role": "user", "content": "What is 12 + 30?"}]},
    "/tokenize": {"model": "MODEL", "prompt": "What is 12 + 30?"},
    "/detokenize": {"model": "MODEL", "tokens": [5, 6, 7]},
    "/invocations": {"model": "MODEL", "prompt": "1 2 3 4", "max_tokens": 16},
    "/apply-template": {"model": "MODEL", "messages": [{"role": "user", "content": "What is 12 + 30?"}]},
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
    parts = [
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{_STYLE}</style>"
        f"<h1>{title}</h1><p>Null fields count as omitted; unknown fields are ignored. "
        'Schema: <a href="openapi.json">openapi.json</a></p>'
        '<form id="key-form"><label>API key, if the server requires one; it stays in this tab '
        '<input id="key" type="password" autocomplete="off" spellcheck="false"></label></form>'
    ]
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
    return (
        "<details><summary>Try it</summary>"
        f'<form class="try" data-method="{method.upper()}" data-path="{escape(path)}">'
        f'{inputs}<div class="row"><button class="send">Send</button>'
        '<button type="button" class="stop" hidden>Stop</button>'
        '<button type="button" class="curl">As curl</button></div>'
        '<p class="status" role="status"></p><pre class="answer" tabindex="0" hidden></pre></form></details>'
    )


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
