"""Sampling fields that llama.cpp and Ollama share."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from weft.server.api.field_types import INT32, Stop, bounded
from weft.server.bodies import Body
from weft.server.errors import bad_request

_RANDOM_SEED = 2**32 - 1  # llama.cpp's default, which like negative seeds asks for a random one


class LlamaSampling(Body):
    """Works as in llama.cpp, except that samplers run in this server's order and that penalties look at all tokens."""

    temperature: float = bounded("temperature", 0.8)
    top_k: int = bounded("top_k", 40, le=INT32)
    top_p: float = bounded("top_p", 0.95)
    min_p: float = bounded("min_p", 0.0)
    seed: int | None = bounded("seed", None)
    presence_penalty: float = bounded("presence_penalty", 0.0)
    frequency_penalty: float = bounded("frequency_penalty", 0.0)
    repeat_penalty: float = bounded("repetition_penalty", 1.0)
    repeat_last_n: int | None = Field(None, ge=-1, le=INT32)  # tokens that penalties look at; -1: all, 0: none
    stop: Stop = Field([])

    def sampling(self, prefix: str = "") -> dict[str, Any]:
        """The fields of `SamplingFields`. Raises `ApiError`. `prefix`: of the names in errors."""
        penalties = {
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": self.repeat_penalty,
        }
        if self.repeat_last_n == 0 or penalties == _NO_PENALTIES:
            penalties = {}
        elif self.repeat_last_n not in (None, -1):
            name = f"{prefix}repeat_last_n"
            raise bad_request(f"{name}: penalties look at all tokens here; use -1, or 0 to switch them off.", name)
        seed = None if self.seed is None or self.seed < 0 or self.seed == _RANDOM_SEED else self.seed
        same = {name: getattr(self, name) for name in ("temperature", "top_k", "top_p", "min_p")}
        return {**same, **penalties, "seed": seed, "stop": self.stop}


_NO_PENALTIES = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
