"""`TemplateBody`: the fields that say how a conversation becomes a prompt."""

from __future__ import annotations

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
    chat_template_kwargs: dict[str, Any] = Field({}, max_length=MAX_VARIABLES)
    """variables of the template, such as `enable_thinking`"""

    def check_template(self) -> None:
        """Raises `ApiError`."""
        if self.continue_final_message and self.add_generation_prompt:
            raise bad_request(
                "continue_final_message needs add_generation_prompt: false.",
                "continue_final_message",
            )
        if taken := _NO_VARIABLES.intersection(self.chat_template_kwargs):
            raise bad_request(f"chat_template_kwargs must not set {clip(min(taken))!r}.", "chat_template_kwargs")

    def template_arguments(self, tools: list[Tool] | None = None) -> dict[str, Any]:
        """For `Tokenizer.render_chat`. `tools`: instead of those offered."""
        offered = self.tools if tools is None else tools
        return {
            **self.chat_template_kwargs,
            **({} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}),
            **({} if self.chat_template is None else {"chat_template": self.chat_template}),
            "tools": [tool.for_template() for tool in offered] or None,
            "documents": self.documents or None,
            "add_generation_prompt": self.add_generation_prompt,
            "continue_final_message": self.continue_final_message,
        }
