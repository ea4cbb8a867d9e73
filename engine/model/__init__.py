"""A model as data: its parts, its operations, its weights.

Owns: `ModelSpec`, the operations of a layer, the families that read checkpoints, packed weights.
May import: the ground files of engine/, kernels/ (packing).
Never: launches a kernel for an iteration; knows a batch, a page or a plan.
"""
