"""The CPU runner.

Owns: the executor and the runner thread over the reference kernels.
May import: `device/` and below.
Never: imports Triton.
"""
