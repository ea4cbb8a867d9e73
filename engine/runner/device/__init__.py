"""What CPU and GPU runners share.

Owns: the `Runner` and `Collectives` interfaces, launcher tables, sampling, pooling, the compile job, the energy meter.
May import: `memory/`, `options/`, `iteration/`.
Never: depends on one device's kernels.
"""
