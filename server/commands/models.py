"""`weft models` lists the models on this machine; `weft pull` downloads one."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from weft.engine.config import TOKENIZER_FILES
from weft.engine.demo import MODEL_PATH
from weft.engine.errors import ConfigError, ModelError
from weft.engine.model import hub
from weft.engine.model.download import amount, cache_dir
from weft.engine.model.gguf.config import unsupported_reason
from weft.engine.model.gguf.file import architecture_of, models_in
from weft.engine.progress import for_stdout


class Model(NamedTuple):
    """A directory that may contain a model."""

    name: str  # Name for `weft serve`.
    where: str  # 'weft', 'hub' or 'directory'.
    path: Path
    revision: str | None  # On the hub: branches and tags, or else the commit.
    files: tuple[Path, ...] = ()  # Parts of a GGUF file.

    def size(self) -> int:
        """Return the size of its files in bytes. Links in the hub's cache are followed."""
        if self.files:
            return sum(file.stat().st_size for file in self.files)
        return sum(file.stat().st_size for file in self.path.rglob("*") if file.is_file())

    def architecture(self) -> str:
        """Return the architecture in its configuration, if any."""
        if self.files:
            return architecture_of(self.files[0]) or ""
        try:
            config = json.loads((self.path / "config.json").read_text(encoding="utf-8"))
            return str((config.get("architectures") or [""])[0])
        except (OSError, ValueError, AttributeError, LookupError, TypeError):
            return ""

    def why_not(self) -> str | None:
        """Return why weft cannot serve it; None if it can."""
        from weft.engine.model.implementation import check_known

        try:
            if self.files:
                return unsupported_reason(self.files[0])
            check_known(self.path)
        except ModelError as error:
            return str(error).replace(f"{self.path}/", "").replace(f"{self.path} ", "it ")
        if absent := hub.missing(self.path):
            again = f"; resume with weft pull {self.name}" if self.where == "hub" else ""
            return f"incomplete: missing {', '.join(absent[:2])}{' …' if len(absent) > 2 else ''}{again}"
        if not any((self.path / name).is_file() for name in TOKENIZER_FILES):
            return f"incomplete: missing {TOKENIZER_FILES[0]}"
        if damaged := hub.damaged(self.path):
            return f"truncated: {', '.join(damaged[:2])}{' …' if len(damaged) > 2 else ''}"
        return None


def _gguf_in(name: str, where: str, path: Path, revision: str | None) -> Iterator[Model]:
    """Yield the GGUF files below `path` as models. `name`: prefix of the file's name."""
    there = [str(file.relative_to(path)) for file in path.rglob("*.gguf")]
    for first, parts in models_in(there).items():
        yield Model(f"{name}{first}", where, path, revision, tuple(path / part for part in parts))


def _has_config(folder: Path) -> bool:
    try:
        return (folder / "config.json").is_file()
    except PermissionError:  # another user's folder: skip it
        return False


def find(folders: Sequence[Path] = ()) -> Iterator[Model]:
    """Yield the demo, the models in the hub's cache, and those in or directly below `folders`. Raises `ConfigError`."""
    yield Model("demo", "weft", MODEL_PATH, None)
    cache = cache_dir()
    for repository in sorted(cache.glob("models--*--*")):
        name = repository.name.removeprefix("models--").replace("--", "/", 1)
        refs: dict[str, list[str]] = {}
        for ref in sorted((repository / "refs").rglob("*")):
            if ref.is_file():
                commit = ref.read_text(encoding="utf-8").strip()
                refs.setdefault(commit, []).append(str(ref.relative_to(repository / "refs")))
        for snapshot in sorted(repository.glob("snapshots/*")):
            revision = ", ".join(refs.get(snapshot.name, [snapshot.name[:12]]))
            yield from _gguf_in(f"{name}:", "hub", snapshot, revision)
            if (snapshot / "config.json").is_file() or not any(snapshot.rglob("*.gguf")):
                yield Model(name, "hub", snapshot, revision)
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"{folder} is not a folder")
        inside = [folder] if _has_config(folder) else sorted(p for p in folder.iterdir() if p.is_dir())
        yield from _gguf_in(f"{folder}/", "directory", folder, None)
        for path in inside:
            if _has_config(path):
                yield Model(str(path), "directory", path, None)


def run(arguments: argparse.Namespace) -> int:
    """Run `weft models`."""
    rows = [
        {
            "name": model.name,
            "where": model.where,
            "revision": model.revision,
            "bytes": model.size(),
            "architecture": model.architecture() or None,
            "path": str(model.path),
            "served": (why := model.why_not()) is None,
            "why_not": why,
        }
        for model in find(arguments.folders)
    ]
    if arguments.json:
        print(json.dumps(rows, indent=2))
        return 0
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in ("model", "size", "revision", "architecture", "supported"):
        table.add_column(column, justify="right" if column == "size" else "left", overflow="fold")
    for row in rows:
        served = "yes" if row["served"] else f"no: {row['why_not']}"
        size = amount(float(str(row["bytes"])))
        table.add_row(str(row["name"]), size, str(row["revision"] or ""), str(row["architecture"] or ""), served)
    for_stdout().print(table, highlight=False, markup=False)
    print(f"hub cache: {cache_dir()}; add models with weft pull ORG/NAME", file=sys.stderr)
    return 0


def pull(arguments: argparse.Namespace) -> int:
    """Run `weft pull`."""
    path = hub.pull(arguments.name, arguments.revision)
    print(f"{arguments.name}: {path}")
    return 0
