"""Merges metrics of several daemons for Prometheus, and reads values from a daemon's metrics."""

from __future__ import annotations

import re
from collections.abc import Mapping

_SAMPLE = re.compile(r"([A-Za-z_:][\w:]*)(\{.*\})?( .*)")


def figures(text: str, names: frozenset[str]) -> dict[str, float]:
    """Return the values of these metrics, summed over labels."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        if not line.startswith("#") and (match := _SAMPLE.match(line)) and match[1] in names:
            found[match[1]] = found.get(match[1], 0.0) + float(match[3].split()[0])
    return found


def labelled(text: str, name: str) -> dict[str, str]:
    """Return the labels of the first sample of an info metric."""
    for line in text.splitlines():
        if line.startswith(f"{name}{{"):
            return dict(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', line))
    return {}


def merged(texts: Mapping[str, str]) -> str:
    """Merge expositions by replica name; each sample gets the label `replica`."""
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for replica, text in texts.items():
        family = ""
        for line in text.splitlines():
            if line.startswith("# "):
                family = line.split(" ", 3)[2]
                known = heads.setdefault(family, [])
                if not any(each.split(" ", 2)[1] == line.split(" ", 2)[1] for each in known):
                    known.append(line)
            elif match := _SAMPLE.match(line):
                labels = f'replica="{replica}"' + (f",{match[2][1:-1]}" if match[2] and match[2] != "{}" else "")
                samples.setdefault(family, []).append(f"{match[1]}{{{labels}}}{match[3]}")
    lines = [line for family, own in samples.items() for line in (*heads.get(family, ()), *own)]
    return "".join(f"{line}\n" for line in lines)
