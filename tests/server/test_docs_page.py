"""The page at `/docs`: its content, and its forms in a real browser."""

from __future__ import annotations

import asyncio
import json
import shlex

import pytest
from browser import Page, in_browser
from page_policy import policy_of
from stub import Script, Server, serving

from weft.server.api import docs
from weft.server.api.aliases import ADMIN_ALIASES

pytestmark = pytest.mark.asyncio(loop_scope="module")


def form(path: str) -> str:
    """The form of an endpoint, as an expression."""
    return f"document.querySelector('form.try[data-path=\"{path}\"]')"


async def send(page: Page, path: str) -> str:
    """Press Send; the status once it is there."""
    await page.run(f"{form(path)}.closest('details').open = true; {form(path)}.querySelector('.send').click()")
    await page.until(f"{form(path)}.querySelector('.stop').hidden")
    return str(await page.run(f"{form(path)}.querySelector('.status').textContent"))


async def answer(page: Page, path: str) -> str:
    return str(await page.run(f"{form(path)}.querySelector('.answer').textContent"))


# -- without a browser


async def test_every_operation_has_a_form_and_every_example_is_accepted(server: Server) -> None:
    schema = (await server.http.get("/openapi.json")).json()
    text = (await server.http.get("/docs")).text
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            assert f'data-method="{method.upper()}" data-path="{path}"' in text
            body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
            if body is None or path.startswith("/admin/") or path in ADMIN_ALIASES:
                continue
            example = docs.example(path, body, schema["components"]["schemas"])
            made = json.loads(json.dumps(example).replace("MODEL", "stub"))
            response = await server.http.request(method, path, json=made)
            expected = 404 if "{" in path else 200  # there is nothing with such an id
            if path.rpartition("/")[2] in ("rerank", "score", "classify"):  # the stub is no model for them
                assert response.json()["error"]["code"] == "wrong_kind_of_model"
                expected = 400
            assert response.status_code == expected, (path, response.text)


async def test_the_policy_allows_only_the_pages_own_script_and_style(server: Server) -> None:
    response = await server.http.get("/docs")
    policy = policy_of(response)
    assert (policy["default-src"], policy["connect-src"]) == ("'none'", "'self'")
    assert "https://" not in response.text.partition("<script")[0]


# -- with one


@pytest.mark.slow
@in_browser
async def test_a_request_can_be_tried_and_its_answer_is_shown(server: Server, page: Page) -> None:
    await page.go(f"{server.url}/docs")
    await page.until(f"{form('/v1/completions')}.querySelector('.body').value.includes('stub')")
    assert (await send(page, "/v1/completions")).startswith("200 OK")
    assert json.loads(await answer(page, "/v1/completions"))["model"] == "stub"
    assert (await send(page, "/v1/chat/completions")).startswith("200 OK")
    assert (await answer(page, "/v1/chat/completions")).rstrip().endswith("data: [DONE]")
    assert (await send(page, "/v1/models/{model}")).startswith("200 OK")
    assert json.loads(await answer(page, "/v1/models/{model}"))["id"] == "stub"
    assert page.errors == []


@pytest.mark.slow
@in_browser
async def test_it_fits_a_phone(server: Server, page: Page) -> None:
    await page.size(390, 844)
    await page.go(f"{server.url}/docs")
    await send(page, "/v1/chat/completions")
    assert await page.run("document.documentElement.scrollWidth") == 390


@pytest.mark.slow
@in_browser
async def test_errors_are_shown(page: Page) -> None:
    path = "/v1/completions"
    async with serving() as server:
        await page.go(f"{server.url}/docs")
        await page.run(f"{form(path)}.querySelector('.body').value = '{{'")
        assert "not valid JSON" in await send(page, path)
        await page.run(f"""{form(path)}.querySelector('.body').value = '{{"prompt": 5}}'""")
        assert (await send(page, path)).startswith("400 ")
        assert "error" in json.loads(await answer(page, path))
    await page.run(f"{form(path)}.querySelector('.body').value = '{{}}'")
    assert "cannot be reached" in await send(page, path)


@pytest.mark.slow
@in_browser
async def test_a_stream_can_be_stopped(page: Page) -> None:
    path = "/v1/chat/completions"
    async with serving() as server:
        server.engine.script = Script(ids=[70] * 400, stop_after=3)
        await page.go(f"{server.url}/docs")
        await page.until(f"{form(path)}.querySelector('.body').value.includes('stub')")
        await page.run(f"{form(path)}.querySelector('.send').click()")
        await page.until(f"{form(path)}.querySelector('.answer').textContent.includes('data:')")
        await page.run(f"{form(path)}.querySelector('.stop').click()")
        await server.settle(lambda: len(server.engine.aborted) == 1)
        await page.until(f"{form(path)}.querySelector('.status').textContent.startsWith('Stopped')")


@pytest.mark.slow
@in_browser
async def test_a_key_is_sent_and_stays_in_the_tab(page: Page) -> None:
    async with serving(api_key=["schlüssel"]) as server:
        await page.go(f"{server.url}/docs")
        assert (await send(page, "/v1/models")).startswith("401 ")
        assert await page.run("document.activeElement.id") == "key"
        await page.type("schlüssel")
        await page.run("document.querySelector('#key').blur()")
        await page.until(f"{form('/v1/completions')}.querySelector('.body').value.includes('stub')")
        assert (await send(page, "/v1/models")).startswith("200 ")
        assert await page.run("[Object.values(localStorage), document.cookie]") == [[], ""]


@pytest.mark.slow
@in_browser
async def test_the_command_for_a_shell_is_the_same_request(server: Server, page: Page) -> None:
    await page.go(f"{server.url}/docs")
    await page.until(f"{form('/tokenize')}.querySelector('.body').value.includes('stub')")
    await page.run(f"""{form("/tokenize")}.querySelector('.body').value = '{{"prompt": "it\\\\u0027s"}}'""")
    await page.run(f"{form('/tokenize')}.querySelector('.curl').click()")
    words = shlex.split(await answer(page, "/tokenize"))
    assert words[:2] == ["curl", f"{server.url}/tokenize"]
    assert json.loads(words[-1]) == {"prompt": "it's"}
    await asyncio.sleep(0)
