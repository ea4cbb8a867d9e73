"""`find_model`: the directory behind a model's name: the demo, a directory, or a repository of the Hugging Face hub.

A repository is downloaded once, into the hub's own cache. What lies there whole is used without asking the hub, so that
a restart needs no network and never changes the weights; `pull` asks for what is newest.
"""

from __future__ import annotations

import glob
import json
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from weft.engine.demo import MODEL_PATH
from weft.engine.errors import ConfigError, ModelError

MAIN = "main"
"""the revision that stands for the newest"""
NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
COMMIT = re.compile(r"[0-9a-f]{40}")
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
PICKLED = ("pytorch_model.bin.index.json", "pytorch_model.bin")
"""read from a directory where there is no safetensors, but not downloaded"""
SMALL = ("*.json", "*.jinja", "*.model", "vocab.txt", "merges.txt")
"""configuration and tokenizer; not what lies in folders of a repository"""
PARTIAL = ".incomplete"
"""of a file that has not come whole; the hub's library never goes on with one of an earlier process"""
OLD_SECONDS = 3600.0
"""nobody writes such a file any more"""
LINE_SECONDS = 5.0
"""between two lines of progress in a log"""
GIB = 2**30


def find_model(model: str, revision: str | None = None, *, weights: bool = True) -> Path:
    """The directory of `demo`, of an existing directory, or of ORG/NAME on the hub, which is downloaded if need be.

    weights: else configuration and tokenizer do. Raises `ConfigError` when it is none of these, `ModelError` when the
    hub does not give it; each one line.
    """
    if model == "demo":
        return MODEL_PATH
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.suffix.lower() == ".gguf":
        raise ConfigError(f"{model}: GGUF is not supported: give a directory or ORG/NAME with safetensors weights")
    if path.exists():
        raise ConfigError(f"{model} is a file: give the Hugging Face model directory that it lies in")
    if not NAME.fullmatch(model):
        raise ConfigError(f"no model directory at {model}: give a Hugging Face model directory, ORG/NAME, or 'demo'")
    return cached(model, revision, weights=weights) or pull(model, revision, weights=weights)


def cache_dir() -> Path:
    """Where the hub's cache lies: HF_HUB_CACHE, or below HF_HOME."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE).expanduser()


def repository(name: str) -> Path:
    """The folder of ORG/NAME in the cache, whether or not it exists."""
    return cache_dir() / f"models--{name.replace('/', '--')}"


def cached(name: str, revision: str | None = None, *, weights: bool = True) -> Path | None:
    """The directory of ORG/NAME in the cache if all of it is there; without `weights`, if its configuration is."""
    revision = revision or MAIN
    folder = repository(name)
    if not COMMIT.fullmatch(revision):
        try:
            revision = (folder / "refs" / revision).read_text(encoding="utf-8").strip()
        except OSError:
            return None
    snapshot = folder / "snapshots" / revision
    there = not missing(snapshot) if weights else (snapshot / "config.json").is_file()
    return snapshot if there else None


def missing(directory: Path) -> list[str]:
    """Names of files that a model directory lacks; a tokenizer counts as there."""
    if not (directory / "config.json").is_file():
        return ["config.json"]
    index = directory / INDEX
    if not index.is_file():
        if any((directory / name).is_file() for name in (SINGLE, *PICKLED[1:])):
            return []
        index = directory / PICKLED[0]
        if not index.is_file():
            return [SINGLE]
    try:
        files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return []  # whoever reads the weights says what is wrong with it
    return [file for file in files if not (directory / file).is_file()]


def pull(name: str, revision: str | None = None, *, weights: bool = True) -> Path:
    """Download what weft reads of ORG/NAME and is not there yet; its directory.

    A connection that breaks goes on at the byte where it was; a process that is ended leaves the files that were whole.
    Shows progress on stderr. weights: else only configuration and tokenizer. Raises `ModelError`, one line.
    """
    from huggingface_hub import HfApi, hf_hub_download, snapshot_download

    if not NAME.fullmatch(name):
        raise ConfigError(f"{name} is no repository of the hub: give ORG/NAME")
    with _translated(name, revision), _quiet():
        api = HfApi(library_name="weft")
        found = api.repo_info(name, revision=revision, timeout=10)
        commit = found.sha or revision or MAIN
        tree: list[Any] = list(api.list_repo_tree(name, revision=commit))
        sizes: dict[str, int] = {f.path: f.size for f in tree if hasattr(f, "size")}
        if "config.json" not in sizes:
            raise ModelError(f"{name} has no config.json: {_instead(sizes)}")

        def fetch(file: str) -> Path:
            return Path(hf_hub_download(name, file, revision=revision))

        config = fetch("config.json")
        _check_architecture(name, config.parent)
        wanted = [f for f in sizes if "/" not in f and any(Path(f).match(p) for p in SMALL)]
        if weights:
            wanted += _weight_files(name, sizes, fetch)
        wanted = list(dict.fromkeys(wanted))
        left = [file for file in wanted if not (config.parent / file).exists()]
        if left:
            _remove_partial(repository(name) / "blobs")
            _check_room(name, sum(sizes[file] for file in left))
            with _Watch(name, repository(name) / "blobs", len(left), sum(sizes[file] for file in left)):
                _in_background(
                    lambda: snapshot_download(
                        name, revision=revision, allow_patterns=[glob.escape(file) for file in wanted]
                    )
                )
        # A branch may have moved meanwhile: what lies under its name now is what was downloaded.
        return cached(name, revision, weights=weights) or config.parent


def _weight_files(name: str, sizes: dict[str, int], fetch: Any) -> list[str]:
    if INDEX in sizes:
        try:
            files = sorted(set(json.loads(fetch(INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError):
            raise ModelError(f"{name}: {INDEX} is not the index of a checkpoint") from None
        if absent := [file for file in files if file not in sizes]:
            raise ModelError(f"{name} lacks {len(absent)} file(s) that its index names: {', '.join(absent[:3])}")
        return [INDEX, *files]
    if SINGLE in sizes:
        return [SINGLE]
    raise ModelError(f"{name} has no {SINGLE}: {_instead(sizes)}")


def _instead(sizes: dict[str, int]) -> str:
    """What a repository has that weft does not read."""
    endings = {Path(file).suffix for file in sizes}
    if ".gguf" in endings:
        return "it has GGUF files, which are not supported; look for the repository they were made from"
    if endings & {".bin", ".pt", ".pth"}:
        return "its weights are pickled, which weft does not load; look for a conversion to safetensors"
    return "it is no model in the form of transformers"


def _check_architecture(name: str, directory: Path) -> None:
    """Before gigabytes are downloaded. Raises `ModelError`."""
    from weft.engine.model.directory import read_spec

    try:
        read_spec(directory)
    except ModelError as error:
        raise ModelError(f"{name}: {str(error).replace(f'{directory}/', '')}; nothing was downloaded") from None


def _remove_partial(blobs: Path) -> None:
    """Gigabytes that an ended download has left."""
    for file in blobs.glob(f"*{PARTIAL}"):
        with suppress(OSError):
            if time.time() - file.stat().st_mtime > OLD_SECONDS:
                file.unlink()


def _check_room(name: str, size: int) -> None:
    """Raises `ModelError` when the disk of the cache is too small."""
    folder = cache_dir()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if size > free:
        raise ModelError(
            f"{name} needs {size / GIB:.1f} GiB, {cache_dir()} has {free / GIB:.1f} GiB free: "
            "make room, or set HF_HOME to a larger disk"
        )


def _in_background(work: Any) -> None:
    """Do it in a thread, so that Ctrl-C ends the wait at once: the hub's own threads finish their files first."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="weft-pull", daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            thread.join(0.2)
    except KeyboardInterrupt:
        print(
            "weft: stopped; files that have come whole are kept, the same command fetches the others",
            file=sys.stderr,
            flush=True,
        )
        raise
    if failed:
        raise failed[0]


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the hub's own bars and warnings: one bar and one line are ours."""
    import logging

    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    logger = logging.getLogger("huggingface_hub")
    level, off = logger.level, are_progress_bars_disabled()
    logger.setLevel(logging.ERROR)
    if not off:
        disable_progress_bars()
    try:
        yield
    finally:
        logger.setLevel(level)
        if not off:
            enable_progress_bars()


@contextmanager
def _translated(name: str, revision: str | None) -> Iterator[None]:
    """The hub's errors as one line each that says what to do."""
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    hub = constants.ENDPOINT
    token = "set HF_TOKEN or run `hf auth login`"
    try:
        yield
    except (ModelError, ConfigError):
        raise
    except GatedRepoError:
        raise ModelError(
            f"{name} is gated: ask for access at {hub}/{name}, then {token} with a token that may read it"
        ) from None
    except RepositoryNotFoundError:
        raise ModelError(
            f"there is no directory {name} here and no repository of that name at {hub} that you may read; "
            f"if it is private, {token}"
        ) from None
    except RevisionNotFoundError:
        raise ModelError(f"{name} has no revision {revision}: name a branch, a tag or a commit") from None
    except (OfflineModeIsEnabled, LocalEntryNotFoundError, HFValidationError, EntryNotFoundError, HfHubHTTPError) as e:
        _refuse(name, hub, e)
    except Exception as error:
        # What carries HTTP below the hub's library has changed with its versions; all of it is named after its cause.
        kind = {base.__name__ for base in type(error).__mro__}
        if not kind & {"HTTPError", "RequestException", "TransportError", "OSError", "RuntimeError"}:
            raise
        if isinstance(error, OSError) and error.errno is not None and error.filename is not None:
            raise ModelError(f"cannot write {error.filename}: {error.strerror}") from None
        _refuse(name, hub, error)


def _refuse(name: str, hub: str, error: Exception) -> NoReturn:
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403):
        raise ModelError(
            f"{hub} refuses to give {name} (status {status}): set HF_TOKEN, or run `hf auth login`, with a token "
            "that may read it"
        ) from None
    why = f"answered with status {status}" if status else f"cannot be reached ({_reason(error)})"
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON"):
        why = "is not asked, because HF_HUB_OFFLINE is set"
    begun = sum(f.stat().st_size for f in repository(name).glob("blobs/*") if f.suffix != PARTIAL)
    part = f", of which {begun / 2**20:,.0f} MiB are there" if begun else ""
    raise ModelError(
        f"there is no directory {name} here, and {hub} {why}: it would download config.json, the tokenizer and "
        f"*.safetensors of {name} to {cache_dir()}{part}. Where there is a network, "
        f"`hf download {name} --local-dir DIR`; then give DIR instead of {name}"
    ) from None


def _reason(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text[:120] or type(error).__name__


class _Watch:
    """Shows how much of a download has come: a bar on a terminal, a line now and then in a log.

    It looks at the files, so it is right whichever way their bytes come.
    """

    def __init__(self, name: str, folder: Path, files: int, size: int) -> None:
        self._name, self._folder, self._size = name, folder, size
        self._before = {file.name for file in self._files() if file.suffix != PARTIAL}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weft-pull-watch", daemon=True)
        print(
            f"weft: downloading {name}: {files} {'file' if files == 1 else 'files'}, {amount(size)}, to {cache_dir()}",
            file=sys.stderr,
            flush=True,
        )

    def __enter__(self) -> None:
        self._begun, self._first = time.monotonic(), self._there()
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _files(self) -> Sequence[Path]:
        try:
            return list(self._folder.iterdir())
        except OSError:
            return []

    def _there(self) -> int:
        size = 0
        for file in self._files():
            if file.name not in self._before:
                try:
                    about = file.stat()
                except OSError:  # it has just got its name
                    continue
                # A file may have its full length before its bytes come.
                size += min(about.st_size, about.st_blocks * 512)
        return min(size, self._size)

    def _run(self) -> None:
        from rich.console import Console

        console = Console(stderr=True)
        if console.is_terminal:
            self._bar(console)
            return
        while not self._ended.wait(LINE_SECONDS):
            there = self._there()
            speed = (there - self._first) / (time.monotonic() - self._begun)
            left = f", {(self._size - there) / speed:,.0f} s left" if speed > 0 else ""
            print(
                f"weft: downloading {self._name}: {amount(there)} of {amount(self._size)}, "
                f"{there / max(1, self._size):.0%}{left}",
                file=sys.stderr,
                flush=True,
            )

    def _bar(self, console: Any) -> None:
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task(self._name, total=self._size, completed=self._first)
            while not self._ended.wait(0.2):
                bar.update(task, completed=self._there())


def amount(size: float) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB / 10 else f"{size / 2**20:.1f} MiB"
