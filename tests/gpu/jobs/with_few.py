"""The `weft` command with `few_decode` for decodes of a few requests, to compare."""

from __future__ import annotations

import sys

from weft.kernels.attention_triton import TritonAttention
from weft.kernels.few_decode import MOST_TOKENS
from weft.server.__main__ import main

TritonAttention.few = MOST_TOKENS

if __name__ == "__main__":
    sys.exit(main())
