"""Triton's interpreter without work whose result is never read: it takes half as long and computes the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


class _Stays:
    """What a launch restores at its end: nothing."""

    def restore(self) -> None: ...


def make_quick() -> None:
    """Patch the interpreter of this process. Call it once."""
    interpreter._patch_lang = _patching_once()
    builder = interpreter.interpreter_builder
    # integer overflow is computed in 64 bits at each sum, and read only in `debug`
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)


def _patching_once() -> Any:
    """`triton.language` keeps the interpreter's definitions after the first launch. Otherwise every launch, and every
    call of a function of Triton's such as `tl.max`, searches it for names to replace."""
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
