"""Compares a daemon's energy metrics with the driver's counter: `check_energy.py PORT FILE`.

Each call appends a line to FILE. Later calls print the joules of requests plus idle since the first call, as a share of
the counter. The script fails if the daemon has no energy metrics.
"""

from __future__ import annotations

import json
import sys
import time
import urllib.request
from pathlib import Path

import pynvml

PARTS = {"requests": "weft_energy_request_joules_total", "rest": "weft_energy_idle_joules_total"}

port, file = int(sys.argv[1]), Path(sys.argv[2])
pynvml.nvmlInit()
counted = pynvml.nvmlDeviceGetTotalEnergyConsumption(pynvml.nvmlDeviceGetHandleByIndex(0)) / 1e3
with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
    lines = answer.read().decode().splitlines()
row = {"at": time.time(), "counter": counted}
for part, name in PARTS.items():
    values = [float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0].split(" ")[0] == name]
    if not values:
        sys.exit(f"no {name} at port {port}")
    row[part] = sum(values)
with file.open("a") as out:
    out.write(json.dumps(row) + "\n")
first = json.loads(file.read_text().splitlines()[0])
if row["at"] > first["at"]:
    counter, requests, rest = (row[key] - first[key] for key in ("counter", *PARTS))
    print(
        f"{row['at'] - first['at']:.0f} s: requests {requests:,.0f} J + idle {rest:,.0f} J = "
        f"{(requests + rest) / counter:.4f} of the counter's {counter:,.0f} J",
        flush=True,
    )
