"""Tuning.

Owns: measurement of kernels at start-up and for searches: prepared calls, timing, tile search.
May import: every other folder of `kernels`.
Never: is imported by another folder of `kernels`.
"""

PUBLIC = ("calls", "measure", "quick_timer", "tile_search")  # The modules that other folders may import.
