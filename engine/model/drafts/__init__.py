"""Models that draft tokens for another model: one module for each kind.

Owns: what `config.json` and the tensors of such a model mean, and the checks that it fits its target.
May import: all of model/.
Never: computes a token; that is `runner/cpu/drafts/`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from weft.engine.config.speculation import DraftOptions, Method
from weft.engine.errors import ModelError
from weft.engine.model.directory import WRONG_KIND
from weft.engine.model.drafts import draft_model, eagle3, mtp
from weft.engine.model.drafts.spec import DraftSpec, Target

_READERS: Mapping[Method, Callable[..., DraftSpec]] = {
    "draft_model": draft_model.read_draft_model,
    "eagle3": eagle3.read_eagle3,
    "mtp": mtp.read_mtp,
}


def read_draft(options: DraftOptions, target: Target) -> DraftSpec | None:
    """Return the model that drafts for `target`; None if drafts need none. Raises `ModelError`, one line, if it does
    not fit."""
    if not options.by_model:
        return None
    path = options.model or target.path
    try:
        return _READERS[options.method](path, target)
    except KeyError as error:
        raise ModelError(f"{path / 'config.json'} lacks {error.args[0]}") from None
    except WRONG_KIND as error:
        raise ModelError(f"{path / 'config.json'} has a value of the wrong kind: {error}") from None
