"""Requests, pages, batches, models and devices. Speaks tokens in, tokens out; knows no HTTP and no text."""

import os

# How long OpenMP threads spin between operations. The library's own choice (milliseconds) makes a CPU engine a hundred
# times slower as soon as another process wants a core; this bridges the gap to the next operation and no more. OpenMP
# reads it when torch is first imported.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
