"""The load generator measures any server, so it must not import ours."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import importlib, pkgutil, sys
import weft.loadgen
for module in pkgutil.iter_modules(weft.loadgen.__path__):
    importlib.import_module("weft.loadgen." + module.name)
ours = {name.split(".")[1] for name in sys.modules if name.startswith("weft.")}
print(sorted(ours), "torch" in sys.modules)
"""


def test_nothing_of_the_server_or_the_engine_is_imported() -> None:
    done = subprocess.run([sys.executable, "-P", "-c", CODE], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['loadgen'] False"


def test_the_flags_are_read_without_anything_heavy() -> None:
    code = "import sys, weft.loadgen.options; print('numpy' in sys.modules, 'matplotlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False False"
