"""`Alternative`: one choice of collectives and what both stages make of it: the transformations of NanoFlow §4.1.2."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import NamedTuple

from weft.autosearch.bench_protocol import Load
from weft.autosearch.machine import Machine
from weft.autosearch.profile import Profile
from weft.autosearch.stages import Progress, Stages, predict
from weft.autosearch.structure import described, transformations
from weft.engine.model.spec import ModelSpec


class Alternative(NamedTuple):
    """A model with some collectives, and what was found for one load."""

    spec: ModelSpec
    stages: Stages

    @property
    def ms(self) -> float:
        """Of one layer: the best pipeline, or the serial plan."""
        return min([self.stages.serial_ms, *(c.ms for c in self.stages.choices)])

    @property
    def line(self) -> str:
        """For the report."""
        found = f"{self.stages.choices[0].ms:.3f}" if self.stages.choices else "-"
        return f"{described(self.spec)}: serial {self.stages.serial_ms:.3f} ms, stage II {found} ms"


def compare(
    spec: ModelSpec, profile: Profile, load: Load, kept: MutableMapping[str, Stages], progress: Progress,
    seconds: float, ended: Callable[[], bool],
) -> list[Alternative]:  # fmt: skip
    """Every choice of collectives that the profile knows, the fastest first; of equals, the one with fewer operations.

    kept: what is there already is not searched again; what is found is added. seconds: for all of them.
    """
    known = [v for v in transformations(spec) if {o.name for o in v.layer_operations()} <= set(profile.features)]
    if len(known) < 2:
        return [Alternative(v, Stages(0.0, 0.0, [])) for v in known]
    found: list[Alternative] = []
    for i, variant in enumerate(known):
        key = f"{described(variant)}: {load.tokens} tokens"
        if key not in kept:
            if found and ended():
                break

            def about(text: str, within: float, i: int = i, key: str = key) -> None:
                progress(f"{key}: {text}", (i + within) / len(known))

            kept[key] = predict(Machine(profile, variant), load, about, seconds / len(known), ended=ended)
        found.append(Alternative(variant, kept[key]))
    return sorted(found, key=lambda a: (a.ms, len(list(a.spec.layer_operations()))))
