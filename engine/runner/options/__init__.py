"""What a device offers and how much of it an engine uses.

Owns: resolved options, device limits, memory footprints and budgets.
May import: `iteration/` and below.
Never: allocates device memory.
"""
