"""Triton's interpreter without work whose result nobody reads: it takes half as long and computes the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


class _Stays:
    """What a launch puts back at its end: nothing."""

    def restore(self) -> None: ...


def make_quick() -> None:
    """In this process; call it once."""
    interpreter._patch_lang = _patching_once()
    builder = interpreter.interpreter_builder
    # whether integers overflow is computed in 64 bits at each sum, and looked at only by `debug`
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)


def _patching_once() -> Any:
    """`triton.language` means what the interpreter has it mean from the first launch on. Else it is searched for what
    to replace at every launch, and at every call of a function of Triton's such as `tl.max`."""
    patch = interpreter._patch_lang
    patched: set[Any] = set()
    met: set[Any] = set()

    def patch_new(fn: Any) -> _Stays:
        if fn not in met:
            met.add(fn)
            own = {module for module in (tl, tl.core) if any(value is module for value in fn.__globals__.values())}
            if not own <= patched:
                patched.update(own)
                patch(fn)
        return _Stays()

    return patch_new
