"""`weft advise`: how many requests should run at once (Equation 2 of "Mind the Memory Gap", arXiv 2503.08311).

Owns: curves of measured points, the choice of slot limit, rate and replicas, and their reports.
May import: the workload, time budget and progress bar of autosearch/; engine/.
Never: changes the slot limit of a serving engine; that is engine/scheduling/slot_limit_keeper.py.
"""
