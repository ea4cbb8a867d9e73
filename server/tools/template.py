"""`TemplateBody`: the fields that say how a conversation becomes a prompt."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import Field

from weft.server.bodies import Body
from weft.server.errors import bad_request, clip
from weft.server.tools.tools import Tool, Tools

MAX_DOCUMENTS = 1024
MAX_VARIABLES = 64

_NO_VARIABLES = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "documents",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "sanitize_control_tokens",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)
"""what `chat_template_kwargs` must not set: arguments of the renderer, and what has a field of its own"""

_SWITCHES = ("enable_thinking", "thinking")
"""what templates call whether to think: Qwen and GLM, DeepSeek and Granite"""

_EFFORTS = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}
"""for gpt-oss, which knows low, medium and high"""

Documents = Annotated[list[dict[str, str]], Field(max_length=MAX_DOCUMENTS)]


class TemplateBody(Body):
    tools: Tools = Field([])
    documents: Documents = Field([])
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    """the name of one of the model's own templates"""
    reasoning_effort: str | None = Field(None, pattern=r"^[a-z]{1,16}$")
    """a variable of templates that know it; others pass it over"""
    enable_thinking: bool | None = None
    """whether the model is to think before it answers, for templates that can say so"""
    chat_template_kwargs: dict[str, Any] = Field({}, max_length=MAX_VARIABLES)
    """variables of the template, such as `enable_thinking`"""

    def _thinking(self, template: str) -> dict[str, Any]:
        """How much is to be thought, in the variables that templates have for it."""
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
            raise bad_request(
                "continue_final_message needs add_generation_prompt: false.",
                "continue_final_message",
            )
        if taken := _NO_VARIABLES.intersection(self.chat_template_kwargs):
            raise bad_request(f"chat_template_kwargs must not set {clip(min(taken))!r}.", "chat_template_kwargs")

    def template_arguments(self, tools: list[Tool] | None = None, template: str = "") -> dict[str, Any]:
        """For `Tokenizer.render_chat`. `tools`: instead of those offered. `template`: which variables it knows."""
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
