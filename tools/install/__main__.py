"""python tools/install COMMAND: installs for the Makefile and the Dockerfile, with the Python of the environment."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import environments
import package
import packages
import resolve
import torch_build

ROOT = Path(__file__).resolve().parents[2]
CONSTRAINTS = ROOT / "constraints.txt"


def main() -> int:
    parser = argparse.ArgumentParser(prog="tools/install", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("torch", help="install the build of torch that fits the machine")
    one.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    one.add_argument("--constraints", type=Path, default=CONSTRAINTS)
    one.add_argument("--no-compile", action="store_true", help="do not compile modules now")
    one = commands.add_parser("pins", help="print the constraints with changed versions: NAME==VERSION …")
    one.add_argument("pins", nargs="*")
    one = commands.add_parser("packages", help="pip install with short output: TITLE ARGUMENTS …")
    one.add_argument("title")
    one.add_argument("arguments", nargs=argparse.REMAINDER)
    one = commands.add_parser("environments", help="separate environments: a file of requirements, a folder, names")
    one.add_argument("file", type=Path)
    one.add_argument("folder", type=Path)
    one.add_argument("names", nargs="*")
    one = commands.add_parser("resolve", help="check that everything resolves from the package index alone")
    one.add_argument("--pip", action="store_true", help="also with pip, for the running Python")
    one = commands.add_parser("archives", help="check the contents of a source distribution and a wheel: their folder")
    one.add_argument("folder", type=Path)
    one = commands.add_parser("ask", help="start weft from another environment and ask it one question: its bin folder")
    one.add_argument("binaries", type=Path)
    given = parser.parse_args()
    if given.command == "torch":
        return torch_build.install(given.constraints, given.device, ["--no-compile"] * given.no_compile)
    if given.command == "pins":
        sys.stdout.write(resolve.repin(CONSTRAINTS.read_text(), given.pins))
        return 0
    if given.command == "packages":
        return packages.install(given.title, torch_build.PIP, given.arguments)
    if given.command == "environments":
        environments.install(given.file, given.folder, given.names)
        return 0
    if given.command == "resolve":
        return min(resolve.verify(ROOT, with_pip=given.pip), 1)
    problems = package.check(given.folder) if given.command == "archives" else package.serves(given.binaries.resolve())
    for problem in problems:
        print(problem, file=sys.stderr)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
