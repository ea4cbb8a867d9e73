"""Operations on tensors. Owns: every kernel with its torch twin and launcher, how they are tuned, timed and identified.

May import: torch, triton, numpy, the package that a back end is named after, `weft.install_hint`; no other folder.
Never: reads a checkpoint or a configuration, schedules requests, allocates pages.
"""
