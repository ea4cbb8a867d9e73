"""`AttentionPath`: how an iteration's attention was computed; `PathCounts`: how often each path ran."""

from __future__ import annotations

from typing import NamedTuple

PATHS = ("decodes", "chunks", "serial", "pod", "pod_in_turn", "pod_tiles", "pod_together", "pipeline")
"""decodes, chunks: only these. serial: two launches. pod*: one launch. In `pod` some programs begin with chunks; in
`pod_in_turn` all begin with decodes; in `pod_tiles` decodes are one-query tiles in the chunks' list; in `pod_together`
every SM runs both at the same time. pipeline: a plan's pipeline, with separate SMs for each."""
PARTS = ("split_decodes", "cut_chunks")
"""On any path: whether decodes were split along their context, and whether tiles of chunks were split along their
keys."""


class AttentionPath(NamedTuple):
    path: str  # One of `PATHS`.
    split_decodes: bool = False
    cut_chunks: bool = False

    @classmethod
    def of(
        cls, decodes: int, chunks: int, *, lanes: int = 1, fused: bool = False, in_turn: bool = False,
        as_tiles: bool = False, together: bool = False, split_decodes: bool = False, cut_chunks: bool = False,
    ) -> AttentionPath:  # fmt: skip
        """lanes: lanes of the pipeline. fused: decodes and chunks are one launch. in_turn: all its programs begin with
        decodes. as_tiles: decodes are tiles in the chunks' list. together: both run at the same time."""
        path = "serial"
        if lanes > 1:
            path = "pipeline"
        elif not chunks or not decodes:
            path = "decodes" if decodes else "chunks"
        elif fused:
            others = "pod_tiles" if as_tiles else "pod_in_turn" if in_turn else "pod"
            path = "pod_together" if together else others
        return cls(path, split_decodes, cut_chunks)


def describe_paths(backend: str, *, cuts: bool, pod: str) -> str:
    """Describe an engine's attention for the log. cuts: tiles of chunks are split along their keys."""
    if backend != "triton":
        return f"attention: {backend}, decodes and chunks in sequence"
    how = "in sequence" if pod == "off" or not cuts else f"in one launch (--pod {pod})"
    splits = ", tiles of short chunks split along their keys" if cuts else ""
    return f"attention: decodes and chunks {how}{splits}"


class PathCounts:
    """Counts of one engine since it started."""

    def __init__(self) -> None:
        self.iterations: dict[str, int] = {}  # Iterations by name, from `PATHS` and `PARTS`.

    def add(self, path: AttentionPath) -> None:
        for name in (path.path, *(part for part in PARTS if getattr(path, part))):
            self.iterations[name] = self.iterations.get(name, 0) + 1
