"""The search for pipelines of nano-operations (NanoFlow §4), and the advisor on slot limits.

Owns: profiles, the cost model, interference, both search stages, measured refinement, break-even loads; `advisor/`.
May import: engine/ and kernels/; OR-Tools only in `structure_search.py` and `resource_assignment.py`.
Never: serves requests; runs in an engine; changes the format of plans, which engine/plans defines.
"""
