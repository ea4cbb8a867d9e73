"""`--chat-template`: a file or a text instead of the model's templates, and what to do if a model has none."""

from __future__ import annotations

from pathlib import Path

import pytest
import vocabularies
from stub import Stub, serving

from weft.engine.errors import ConfigError
from weft.server.config import ServeConfig
from weft.server.daemon.cli import main
from weft.server.text.chat_template import read_chat_template
from weft.server.text.tokenizer import Tokenizer

TEMPLATE = "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"


def test_a_template_comes_from_a_file_or_is_given_itself(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text(TEMPLATE)
    assert read_chat_template(str(file)) == read_chat_template(TEMPLATE) == TEMPLATE
    assert read_chat_template("fixed\nwords") == "fixed\nwords"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file or directory"),
        (b"{% for x in y %}", "line 1: Unexpected end of template"),
        (b"fine\n{{ broken", "line 2: "),
        (b"\xff\xfe", "not UTF-8 at byte 0"),
        (b" \n", "the file is empty"),
    ],
)
def test_an_unusable_file_is_one_line_at_the_start(
    tmp_path: Path, content: bytes | None, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "chat.jinja"
    if content is not None:
        file.write_bytes(content)
    assert main(["serve", "--port", "0", "--chat-template", str(file)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert str(file) in error
    assert "--chat-template" in error
    assert error.count("\n") == 1


def test_a_template_that_is_given_itself_may_be_unusable_too() -> None:
    with pytest.raises(ConfigError, match="the given template, line 1"):
        read_chat_template("{{ x")


def test_each_of_several_models_may_have_its_own() -> None:
    config = ServeConfig(models=[{"model": "demo", "chat_template": "a.jinja"}, "demo served_model_name=b"])
    assert [each.chat_template for each in config.each] == ["a.jinja", None]


def test_it_replaces_the_models_templates(tmp_path: Path) -> None:
    vocabularies.save(vocabularies.byte_level(), tmp_path)
    tokenizer = Tokenizer.load(tmp_path, TEMPLATE)
    assert tokenizer.chat_template == TEMPLATE
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    assert Tokenizer.load(tmp_path, TEMPLATE).can_chat


@pytest.mark.asyncio
async def test_a_model_without_a_template_gets_a_message_that_says_what_to_do() -> None:
    tokenizer = Tokenizer(vocabularies.wrapped(vocabularies.byte_level(), chat_template=None))
    async with serving(attach=False) as server:
        stub = Stub(tokenizer)
        server.service.attach(stub, stub.describe(), tokenizer)
        for path, where in (("/v1/chat/completions", "error"), ("/v1/messages", "error")):
            body = {"model": "stub", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}
            response = await server.post(path, body)
            assert response.status_code == 400
            assert "--chat-template FILE" in response.json()[where]["message"]
        chat = await server.post("/api/chat", {"model": "stub", "messages": [{"role": "user", "content": "hi"}]})
        assert "--chat-template FILE" in chat.json()["error"]
        generated = await server.post("/api/generate", {"model": "stub", "prompt": "hi", "stream": False})
        assert generated.json()["response"] == "hello world"  # the prompt, continued
        assert stub.prompt() == tokenizer.encode("hi")


def test_the_chat_command_gives_it_to_the_server_that_it_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given: list[object] = []

    def own_server(*arguments: object, options: object) -> None:
        given.extend((arguments[0], options))
        raise ConfigError("stop here")

    monkeypatch.setattr("weft.server.commands.chat.own_server", own_server)
    assert main(["chat", "some/model", "--chat-template", "a.jinja"]) == 2
    assert given == ["some/model", ["--chat-template", "a.jinja"]]
    for arguments in (["--url", "http://127.0.0.1:1"], []):
        assert main(["chat", "--chat-template", "a.jinja", *arguments]) == 2
        assert "--chat-template needs a MODEL to serve" in capsys.readouterr().err
