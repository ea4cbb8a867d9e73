"""A model as data: its parts, its operations, its weights.

Owns: `ModelSpec`, the operations of a layer, the families that read checkpoints, packed weights.
May import: the top-level files of engine/, kernels/ (packing).
Never: launches a kernel for an iteration, or depends on a batch, a page or a plan.
"""
