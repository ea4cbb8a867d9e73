"""weft: an OpenAI-compatible serving daemon for large language models.

The repository root is this package; `weft.engine`, `weft.kernels`, `weft.server` are the folders beside this file.
Offline use::

    from weft import LLM, SamplingParams
    print(LLM("demo").chat([{"role": "user", "content": "What is 12 + 30?"}])[0].text)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from weft.engine.llm import LLM, Completion
    from weft.engine.sampling import SamplingParams

__all__ = ["LLM", "Completion", "SamplingParams", "__version__"]

_HOMES = {"LLM": "weft.engine.llm", "Completion": "weft.engine.llm", "SamplingParams": "weft.engine.sampling"}


def __getattr__(name: str) -> Any:
    # Lazy, so that `weft --help` and the API process do not import torch.
    if name not in _HOMES:
        raise AttributeError(f"module 'weft' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
