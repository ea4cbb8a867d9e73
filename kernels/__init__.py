"""Operations on tensors.

Owns: every kernel with its reference implementation and launcher, its tuning, timing and identity.
May import: torch, triton, numpy, the package that a backend is named after, `weft.install_hint`; no other folder.
Never: reads a checkpoint or a configuration, schedules requests, allocates pages.
"""
