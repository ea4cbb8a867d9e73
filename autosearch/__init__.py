"""Finds pipelines of nano-operations: cost model, profiles, interference, two search stages, measured refinement."""
