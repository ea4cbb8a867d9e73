"""An iteration as arrays.

Owns: the batch that the scheduler hands over, its division into nano-batches, attention work lists, cost shares.
May import: `plans/`, `model/` and below.
Never: touches a device.
"""
