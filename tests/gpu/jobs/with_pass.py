"""The `weft` command with a pass over the rows behind attention, which then leaves 16 bits: as it was, to compare."""

from __future__ import annotations

import sys

from weft.kernels.attention_triton import TritonAttention
from weft.server.__main__ import main

TritonAttention.quantizes = False  # type: ignore[assignment,method-assign]

if __name__ == "__main__":
    sys.exit(main())
