"""Waits until a daemon and all its engines serve: `wait_ready.py PORT PID [SECONDS]`.

Fails if the process ends or the time (180 s) is over.
"""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.error
import urllib.request

port, pid = int(sys.argv[1]), int(sys.argv[2])
begun = time.monotonic()
while time.monotonic() - begun < float(sys.argv[3] if len(sys.argv) > 3 else 180):
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5) as answer:
            engines = json.load(answer).get("engines", [])  # listed if there are several
    except (urllib.error.URLError, OSError):
        engines = [{"state": "away"}]
    if all(engine["state"] == "serving" for engine in engines):
        print(f"ready after {time.monotonic() - begun:.1f} s", flush=True)
        break
    os.kill(pid, 0)  # raises if the process has ended
    time.sleep(0.1)
else:
    sys.exit(f"no daemon became ready at port {port}")
