"""`AttentionPath`: which way an iteration's attention went; `PathCounts`: how often each."""

from __future__ import annotations

from typing import NamedTuple

PATHS = ("decodes", "chunks", "serial", "pod", "pod_in_turn", "pod_tiles", "pod_together", "pipeline")
"""decodes alone; prompts' chunks alone; decodes, then chunks; both in one launch, some programs beginning with chunks;
in one launch, all beginning with decodes; in one launch and one list, decodes as tiles of one query; in one launch,
both at the same time on every SM; a plan's pipeline, where each has its share of the SMs"""
PARTS = ("split_decodes", "cut_chunks")
"""in iterations of any path: requests whose decode is cut along its context; tiles of chunks that are cut along their
keys"""


class AttentionPath(NamedTuple):
    path: str
    """of `PATHS`"""
    split_decodes: bool = False
    cut_chunks: bool = False

    @classmethod
    def of(
        cls, decodes: int, chunks: int, *, lanes: int = 1, fused: bool = False, in_turn: bool = False,
        as_tiles: bool = False, together: bool = False, split_decodes: bool = False, cut_chunks: bool = False,
    ) -> AttentionPath:  # fmt: skip
        """`lanes`: of the pipeline; `fused`: decodes and chunks are one launch; `in_turn`: all its programs begin with
        decodes; `as_tiles`: decodes are tiles among the chunks'; `together`: both are done at the same time."""
        path = "serial"
        if lanes > 1:
            path = "pipeline"
        elif not chunks or not decodes:
            path = "decodes" if decodes else "chunks"
        elif fused:
            others = "pod_tiles" if as_tiles else "pod_in_turn" if in_turn else "pod"
            path = "pod_together" if together else others
        return cls(path, split_decodes, cut_chunks)


def possible_paths(backend: str, *, cuts: bool, pod: str) -> str:
    """For the log: what an engine's iterations may do. `cuts`: tiles of chunks are cut along their keys."""
    if backend != "triton":
        return f"attention: {backend}, decodes and chunks one after the other"
    how = "one after the other" if pod == "off" or not cuts else f"in one launch (--pod {pod})"
    pieces = ", tiles of short chunks cut along their keys" if cuts else ""
    return f"attention: decodes and chunks {how}{pieces}"


class PathCounts:
    """Of one engine, since it started."""

    def __init__(self) -> None:
        self.iterations: dict[str, int] = {}
        """by `PATHS` and `PARTS`"""

    def add(self, path: AttentionPath) -> None:
        names = [path.path, *(part for part in PARTS if getattr(path, part))]
        for name in names:
            self.iterations[name] = self.iterations.get(name, 0) + 1
