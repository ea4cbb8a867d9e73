"""`TemplateBody`: request fields that control how a conversation becomes a prompt."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import Field

from weft.server.bodies import Body
from weft.server.errors import bad_request, clip
from weft.server.tools.tools import Tool, Tools

MAX_DOCUMENTS = 1024
MAX_VARIABLES = 64

_NO_VARIABLES = frozenset({
    "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "documents", "max_length",
    "messages", "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors",
    "sanitize_control_tokens", "tokenize", "tokenizer_kwargs", "tools", "truncation",
})  # fmt: skip
"""Names that `chat_template_kwargs` must not set: the renderer's arguments, and separate request fields."""

_SWITCHES = ("enable_thinking", "thinking")
"""Template variables that switch reasoning: Qwen and GLM, DeepSeek and Granite."""

_EFFORTS = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}
"""Mapping for gpt-oss, which accepts low, medium and high."""

Documents = Annotated[list[dict[str, str]], Field(max_length=MAX_DOCUMENTS)]


class TemplateBody(Body):
    tools: Tools = Field([])
    documents: Documents = Field([])
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None  # Name of one of the model's templates.
    reasoning_effort: str | None = Field(None, pattern=r"^[a-z]{1,16}$")
    """A template variable; templates without it ignore it."""
    enable_thinking: bool | None = None
    """Whether the model reasons before it answers, if its template supports the switch."""
    chat_template_kwargs: dict[str, Any] = Field({}, max_length=MAX_VARIABLES)
    """Template variables, such as `enable_thinking`."""

    def _thinking(self, template: str) -> dict[str, Any]:
        """Return the template variables that control reasoning."""
        given, effort = self.chat_template_kwargs, self.reasoning_effort
        on = self.enable_thinking
        if on is None:
            on = next((given[name] for name in _SWITCHES if isinstance(given.get(name), bool)), None)
        if on is None and effort is not None:
            on = effort != "none"
        out: dict[str, Any] = {}
        if on is not None:
            asked = self.enable_thinking is not None
            known = [name for name in _SWITCHES if re.search(rf"\b{name}\b", template)]
            out = {name: on for name in known if asked or name not in given}
        if effort is not None:
            out["reasoning_effort"] = _EFFORTS.get(effort, effort) if "<|channel|>" in template else effort
        return out

    def check_template(self) -> None:
        """Raises `ApiError`."""
        if self.continue_final_message and self.add_generation_prompt:
            raise bad_request("continue_final_message needs add_generation_prompt: false.", "continue_final_message")
        if taken := _NO_VARIABLES.intersection(self.chat_template_kwargs):
            raise bad_request(f"chat_template_kwargs must not set {clip(min(taken))!r}.", "chat_template_kwargs")

    def template_arguments(self, tools: list[Tool] | None = None, template: str = "") -> dict[str, Any]:
        """Return arguments for `Tokenizer.render_chat`. `tools`: replaces the offered tools. `template`: its text."""
        offered = self.tools if tools is None else tools
        return {
            **self.chat_template_kwargs,
            **self._thinking(template),
            **({} if self.chat_template is None else {"chat_template": self.chat_template}),
            "tools": [tool.for_template() for tool in offered] or None,
            "documents": self.documents or None,
            "add_generation_prompt": self.add_generation_prompt,
            "continue_final_message": self.continue_final_message,
        }
