"""`TemplateBody`: request fields that control how a conversation becomes a prompt."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

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


class ThinkingSwitch(Body):
    """Anthropic's, DeepSeek's and GLM's form of `enable_thinking`. `adaptive` and `auto` leave it to the template."""

    type: Literal["enabled", "disabled", "adaptive", "auto"]
    budget_tokens: int | None = Field(None, ge=0, le=2**31 - 1)  # `max_thinking_tokens` of a chat


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
    thinking: bool | ThinkingSwitch | None = None
    """Another form of `enable_thinking`."""
    chat_template_kwargs: dict[str, Any] = Field({}, max_length=MAX_VARIABLES)
    """Template variables, such as `enable_thinking`."""

    @property
    def thinks(self) -> bool | None:
        """`enable_thinking`, in either form."""
        return self._switched if self.enable_thinking is None else self.enable_thinking

    @property
    def _switched(self) -> bool | None:
        switch = self.thinking
        return {"enabled": True, "disabled": False}.get(switch.type) if isinstance(switch, ThinkingSwitch) else switch

    def _thinking(self, template: str) -> dict[str, Any]:
        """Return the template variables that control reasoning."""
        given, effort = self.chat_template_kwargs, self.reasoning_effort
        on = asked_for = self.thinks
        if on is None:
            on = next((given[name] for name in _SWITCHES if isinstance(given.get(name), bool)), None)
        if on is None and effort is not None:
            on = effort != "none"
        out: dict[str, Any] = {}
        if on is not None:
            asked = asked_for is not None
            known = [name for name in _SWITCHES if re.search(rf"\b{name}\b", template)]
            out = {name: on for name in known if asked or name not in given}
        if effort is not None:
            out["reasoning_effort"] = _EFFORTS.get(effort, effort) if "<|channel|>" in template else effort
        return out

    def check_template(self) -> None:
        """Raises `ApiError`."""
        if self.continue_final_message and self.add_generation_prompt:
            if "add_generation_prompt" in self.model_fields_set:
                what = "continue_final_message needs add_generation_prompt: false."
                raise bad_request(what, "continue_final_message")
            self.add_generation_prompt = False
        if self._switched is not None and self.thinks is not self._switched:
            raise bad_request("thinking and enable_thinking contradict each other.", "thinking")
        if taken := _NO_VARIABLES.intersection(self.chat_template_kwargs):
            raise bad_request(f"chat_template_kwargs must not set {clip(min(taken))!r}.", "chat_template_kwargs")

    def check_without_messages(self) -> None:
        """Raises `ApiError` for fields that need a conversation to have an effect."""
        for name in TemplateBody.model_fields:
            if getattr(self, name) != type(self).model_fields[name].get_default():
                raise bad_request(f"{name} requires messages.", name)

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
