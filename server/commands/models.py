"""`weft models` and `weft pull`: the models on this machine, and how one gets there."""

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
from weft.engine.model.gguf.choice import models_in
from weft.engine.model.gguf.config import refused
from weft.engine.model.gguf.file import architecture_of
from weft.engine.progress import for_stdout


class Model(NamedTuple):
    """A directory that may hold a model."""

    name: str
    """as `weft serve` takes it"""
    where: str
    """'weft', 'hub' or 'directory'"""
    path: Path
    revision: str | None
    """of the hub: branches and tags that name it, else the commit"""
    files: tuple[Path, ...] = ()
    """the parts of a GGUF file"""

    def size(self) -> int:
        """Bytes of its files; those of the hub's cache are links to them."""
        if self.files:
            return sum(file.stat().st_size for file in self.files)
        return sum(file.stat().st_size for file in self.path.rglob("*") if file.is_file())

    def architecture(self) -> str:
        """What its configuration names; nothing where there is none."""
        if self.files:
            return architecture_of(self.files[0]) or ""
        try:
            config = json.loads((self.path / "config.json").read_text(encoding="utf-8"))
            return str((config.get("architectures") or [""])[0])
        except (OSError, ValueError, AttributeError, LookupError, TypeError):
            return ""

    def why_not(self) -> str | None:
        """Why weft does not serve it; None if it does."""
        from weft.engine.model.implementation import check_known

        try:
            if self.files:
                return refused(self.files[0])
            check_known(self.path)
        except ModelError as error:
            return str(error).replace(f"{self.path}/", "").replace(f"{self.path} ", "it ")
        if absent := hub.missing(self.path):
            again = f"; weft pull {self.name} goes on" if self.where == "hub" else ""
            return f"incomplete, without {', '.join(absent[:2])}{' …' if len(absent) > 2 else ''}{again}"
        if not any((self.path / name).is_file() for name in TOKENIZER_FILES):
            return f"incomplete, without {TOKENIZER_FILES[0]}"
        if damaged := hub.damaged(self.path):
            return f"cannot be read whole: {', '.join(damaged[:2])}{' …' if len(damaged) > 2 else ''}"
        return None


def _gguf_in(name: str, where: str, path: Path, revision: str | None) -> Iterator[Model]:
    """The GGUF files below `path`, each a model. `name`: before the name of the file."""
    there = [str(file.relative_to(path)) for file in path.rglob("*.gguf")]
    for first, parts in models_in(there).items():
        yield Model(f"{name}{first}", where, path, revision, tuple(path / part for part in parts))


def _has_config(folder: Path) -> bool:
    try:
        return (folder / "config.json").is_file()
    except PermissionError:  # somebody else's: the others are listed
        return False


def find(folders: Sequence[Path] = ()) -> Iterator[Model]:
    """The demo, what the hub's cache has, and models in these folders or right below them. Raises `ConfigError`."""
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
            raise ConfigError(f"there is no folder {folder}")
        inside = [folder] if _has_config(folder) else sorted(p for p in folder.iterdir() if p.is_dir())
        yield from _gguf_in(f"{folder}/", "directory", folder, None)
        for path in inside:
            if _has_config(path):
                yield Model(str(path), "directory", path, None)


def run(arguments: argparse.Namespace) -> int:
    """The command."""
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
    for column in ("model", "size", "revision", "architecture", "weft serves it"):
        table.add_column(column, justify="right" if column == "size" else "left", overflow="fold")
    for row in rows:
        served = "yes" if row["served"] else f"no: {row['why_not']}"
        size = amount(float(str(row["bytes"])))
        table.add_row(str(row["name"]), size, str(row["revision"] or ""), str(row["architecture"] or ""), served)
    for_stdout().print(table, highlight=False, markup=False)
    print(f"hub cache: {cache_dir()}; weft pull ORG/NAME adds to it", file=sys.stderr)
    return 0


def pull(arguments: argparse.Namespace) -> int:
    """The command `weft pull`."""
    path = hub.pull(arguments.name, arguments.revision)
    print(f"{arguments.name}: {path}")
    return 0
