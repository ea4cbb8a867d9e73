"""`weft bench offline`, `multiround` and `scheduler`: the engine in this process, timed.

Owns: workloads, figures, traces and power readings of a run.
May import: everything in engine/.
Never: is imported by anything that serves.
"""
