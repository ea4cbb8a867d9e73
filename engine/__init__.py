"""Requests, pages, batches, models and devices. Takes and returns token ids.

Owns: everything between a request's token ids and the device: queue, scheduler, pages, models, plans, runners, ranks.
May import: kernels/.
Never: uses HTTP; handles text, except where docs/design.md says so (grammars, bad words, `LLM`).
"""

import os

# How long OpenMP threads spin between operations. The library's own choice (milliseconds) makes a CPU engine a hundred
# times slower as soon as another process wants a core; this bridges the gap to the next operation and no more. OpenMP
# reads it when torch is first imported.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
