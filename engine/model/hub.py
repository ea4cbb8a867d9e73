"""`find_model`: resolves a model's name to a directory: the demo, a directory, a GGUF file or a hub repository.

A repository is downloaded once, into the hub's cache. A complete cached copy is used without contacting the hub, so a
restart needs no network and never changes the weights. `pull` fetches the newest revision.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from weft.engine.config import expanded
from weft.engine.demo import MODEL_PATH
from weft.engine.errors import ConfigError, ModelError
from weft.engine.model.download import PARTIAL, cache_dir, download, repository
from weft.engine.model.gguf.file import INDEX as GGUF_INDEX
from weft.engine.model.index import read_index

MAIN = "main"  # The default revision.
NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
COMMIT = re.compile(r"[0-9a-f]{40}")
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
PICKLED = ("pytorch_model.bin.index.json", "pytorch_model.bin")
"""Read from a directory without safetensors files, but not downloaded."""
SMALL = ("*.json", "*.jinja", "*.model", "vocab.txt", "merges.txt")
"""Configuration and tokenizer files at the top level; `FOLDERS` lists those in folders."""
_DENSE = ("config.json", "model.safetensors")
FOLDERS: dict[str, str | tuple[str, ...]] = {
    "additional_chat_templates": ".jinja", "1_Pooling": ".json", "2_Dense": _DENSE, "3_Dense": _DENSE,
}  # fmt: skip
"""File name endings to read, by folder."""
GGUF = ".gguf"
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)


def find_model(model: str, revision: str | None = None, *, weights: bool = True, tokenizer: bool = True) -> Path:
    """Return the directory of `demo`, of an existing directory, of a GGUF file, or of ORG/NAME on the hub, downloading
    it if needed. ORG/NAME:FILE is a GGUF file of a repository.

    weights: False if configuration and tokenizer are enough. tokenizer: False if a GGUF file's is not needed. Raises
    `ConfigError` if the name is none of these and `ModelError` if the hub does not provide it, each one line.
    """
    if model == "demo":
        return MODEL_PATH
    path = expanded(model)
    if path.is_dir():
        return path
    if path.suffix.lower() == GGUF and path.is_file():
        from weft.engine.model.gguf.directory import gguf_directory

        return gguf_directory(path, tokenizer=tokenizer)
    if path.exists():
        raise ConfigError(f"{model} is a file: give the Hugging Face model directory that contains it")
    if not NAME.fullmatch(model.partition(":")[0]):
        raise ConfigError(f"no model directory at {model}: give a Hugging Face model directory, ORG/NAME, or 'demo'")
    return cached(model, revision, weights=weights) or pull(model, revision, weights=weights)


def cached(name: str, revision: str | None = None, *, weights: bool = True) -> Path | None:
    """Return the cached directory of ORG/NAME if complete; without `weights`, if its configuration is there."""
    name, _, file = name.partition(":")
    revision = revision or MAIN
    folder = repository(name)
    if not COMMIT.fullmatch(revision):
        try:
            revision = (folder / "refs" / revision).read_text(encoding="utf-8").strip()
        except OSError:
            return None
    snapshot = folder / "snapshots" / revision
    if file or not (snapshot / "config.json").is_file():
        return _cached_gguf(name, snapshot, file)
    there = not missing(snapshot) if weights else (snapshot / "config.json").is_file()
    return snapshot if there else None


def _cached_gguf(name: str, snapshot: Path, file: str) -> Path | None:
    from weft.engine.model.gguf.directory import gguf_directory
    from weft.engine.model.gguf.file import choose

    there = [str(path.relative_to(snapshot)) for path in snapshot.rglob(f"*{GGUF}")]
    try:
        return gguf_directory(snapshot / choose(name, there, file)[0])
    except ModelError:
        return None  # missing or incomplete; loading reports a damaged file


def missing(directory: Path) -> list[str]:
    """Return the names of files that a model directory lacks, tokenizer files aside."""
    if not (directory / "config.json").is_file():
        return ["config.json"]
    if (directory / GGUF_INDEX).is_file():
        return [file.name for file in directory.glob(f"*{GGUF}") if not file.exists()]
    return [file for file in _weights(directory) if not (directory / file).is_file()]


def damaged(directory: Path) -> list[str]:
    """Return safetensors files that are incomplete, for example after an aborted copy or on a full disk.

    It reads only headers; loading finds changed bits."""
    from safetensors import SafetensorError, safe_open

    found = []
    for file in _weights(directory):
        if file.endswith(".safetensors") and (directory / file).is_file():
            try:
                with safe_open(directory / file, "np"):
                    pass
            except (OSError, SafetensorError):
                found.append(file)
    return found


def _weights(directory: Path) -> list[str]:
    """Return the names of the weight files, safetensors if both formats exist."""
    index = directory / INDEX
    if not index.is_file():
        for name in (SINGLE, *PICKLED[1:]):
            if (directory / name).is_file():
                return [name]
        index = directory / PICKLED[0]
        if not index.is_file():
            return [SINGLE]
    try:
        return sorted(set(read_index(index).values()))
    except (OSError, ValueError):
        return []  # loading reports errors in the index


def pull(name: str, revision: str | None = None, *, weights: bool = True) -> Path:
    """Download the files of ORG/NAME or ORG/NAME:FILE that weft reads and lacks, and return the directory.

    A broken connection resumes at the byte where it stopped; an aborted process leaves complete files. Progress goes
    to stderr. weights: False for only configuration and tokenizer. Raises `ModelError`, one line."""
    from huggingface_hub import HfApi, hf_hub_download

    name, _, file = name.partition(":")
    if not NAME.fullmatch(name):
        raise ConfigError(f"{name} is no repository of the hub: give ORG/NAME")
    with _hub_errors(name, revision), _quiet():
        api = HfApi(library_name="weft")
        found = api.repo_info(name, revision=revision, timeout=10)
        commit = found.sha or revision or MAIN
        tree: list[Any] = list(api.list_repo_tree(name, revision=commit))
        sizes: dict[str, int] = {f.path: f.size for f in tree if hasattr(f, "size")}
        inside: dict[str, int] = {}
        whole = "config.json" in sizes and (INDEX in sizes or SINGLE in sizes)
        if file or (not whole and any(f.endswith(GGUF) for f in sizes)):
            return _pull_gguf(name, revision, api, commit, file, weights=weights)
        if "config.json" not in sizes:
            raise ModelError(f"{name} has no config.json: {_instead(sizes)}")

        def fetch(file: str) -> Path:
            return Path(hf_hub_download(name, file, revision=revision))

        config = fetch("config.json")
        _check_architecture(name, config.parent)
        for folder in {entry.path for entry in tree} & set(FOLDERS):
            more: list[Any] = list(api.list_repo_tree(name, folder, revision=commit))
            inside |= {f.path: f.size for f in more if f.path.endswith(FOLDERS[folder])}
        wanted = [*(f for f in sizes if any(Path(f).match(p) for p in SMALL))]
        wanted += [f for f in inside if weights or not f.endswith(".safetensors")]
        if weights:
            wanted += _weight_files(name, sizes, fetch)
        wanted, sizes = list(dict.fromkeys(wanted)), sizes | inside
        download(name, revision, wanted, {f: sizes[f] for f in wanted if not (config.parent / f).exists()})
        # The branch may have moved: use what its name refers to now.
        return cached(name, revision, weights=weights) or config.parent


def _pull_gguf(name: str, revision: str | None, api: Any, commit: str, file: str, *, weights: bool) -> Path:
    """Pull a GGUF file, which needs nothing else of the repository."""
    from weft.engine.model.gguf.directory import gguf_directory
    from weft.engine.model.gguf.file import choose

    tree = api.list_repo_tree(name, revision=commit, recursive=True)
    sizes: dict[str, int] = {f.path: f.size for f in tree if hasattr(f, "size")}
    wanted = choose(name, sizes, file)
    snapshot = repository(name) / "snapshots" / commit
    left = {f: sizes[f] for f in wanted if not (snapshot / f).exists()}
    if left and not weights:
        raise ModelError(f"{name}:{wanted[0]} says what it is in the file itself: weft pull {name}:{wanted[0]} first")
    return gguf_directory(download(name, revision, wanted, left) / wanted[0] if left else snapshot / wanted[0])


def _weight_files(name: str, sizes: dict[str, int], fetch: Any) -> list[str]:
    if INDEX in sizes:
        try:
            files = sorted(set(read_index(fetch(INDEX)).values()))
        except ValueError:
            raise ModelError(f"{name}: {INDEX} is not the index of a checkpoint") from None
        if absent := [file for file in files if file not in sizes]:
            raise ModelError(f"{name} lacks {len(absent)} file(s) that its index names: {', '.join(absent[:3])}")
        return [INDEX, *files]
    if SINGLE in sizes:
        return [SINGLE]
    raise ModelError(f"{name} has no {SINGLE}: {_instead(sizes)}")


def _instead(sizes: dict[str, int]) -> str:
    """Return why weft cannot read a repository."""
    endings = {Path(file).suffix for file in sizes}
    if endings & {".bin", ".pt", ".pth"}:
        return "its weights are pickled, which weft does not load; look for a conversion to safetensors"
    return "it is not a model in transformers' format"


def _check_architecture(name: str, directory: Path) -> None:
    """Raise `ModelError` for an unsupported model, before downloading gigabytes."""
    from weft.engine.model.implementation import check_known

    try:
        check_known(directory, trusted=True)  # runs no code; starting an engine asks for trust
    except ModelError as error:
        raise ModelError(f"{name}: {str(error).replace(f'{directory}/', '')}; nothing was downloaded") from None


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the hub's own bars and warnings in favor of weft's."""
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
def _hub_errors(name: str, revision: str | None) -> Iterator[None]:
    """Translate the hub's errors into one line each, with a remedy."""
    from huggingface_hub import constants, errors

    hub = constants.ENDPOINT
    token = "set HF_TOKEN or run `hf auth login`"
    try:
        yield
    except (ModelError, ConfigError):
        raise
    except errors.GatedRepoError:
        raise ModelError(
            f"{name} is gated: request access at {hub}/{name}, then {token} with a token that may read it"
        ) from None
    except errors.RepositoryNotFoundError:
        raise ModelError(
            f"there is no directory {name} here and no repository of that name at {hub} that you may read; "
            f"if it is private, {token}"
        ) from None
    except errors.RevisionNotFoundError:
        raise ModelError(f"{name} has no revision {revision}: name a branch, a tag or a commit") from None
    except (
        errors.OfflineModeIsEnabled,
        errors.HFValidationError,
        errors.EntryNotFoundError,
        errors.HfHubHTTPError,
    ) as e:
        _refuse(name, hub, e)
    except Exception as error:
        # The hub's library has changed its HTTP client between versions; all of them name errors by cause.
        kind = {base.__name__ for base in type(error).__mro__}
        if not kind & {"HTTPError", "RequestException", "TransportError", "OSError", "RuntimeError"}:
            raise
        if isinstance(error, OSError) and (error.filename is not None or error.errno in DISK_ERRORS):
            raise ModelError(f"cannot use {error.filename or cache_dir()}: {error.strerror}") from None
        _refuse(name, hub, error)


def _refuse(name: str, hub: str, error: Exception) -> NoReturn:
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403):
        raise ModelError(
            f"{hub} refuses access to {name} (status {status}): set HF_TOKEN, or run `hf auth login`, with a token "
            "that may read it"
        ) from None
    why = f"answered with status {status}" if status else f"cannot be reached ({_reason(error)})"
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON"):
        why = "is not contacted, because HF_HUB_OFFLINE is set"
    begun = sum(f.stat().st_size for f in repository(name).glob("blobs/*") if f.suffix != PARTIAL)
    part = f" ({begun / 2**20:,.0f} MiB of them are cached)" if begun else ""
    raise ModelError(
        f"there is no directory {name} here, and {hub} {why}; weft would download config.json, the tokenizer and "
        f"*.safetensors of {name} to {cache_dir()}{part}. On a machine with a network, run "
        f"`hf download {name} --local-dir DIR`; then give DIR instead of {name}"
    ) from None


def _reason(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text[:120] or type(error).__name__
