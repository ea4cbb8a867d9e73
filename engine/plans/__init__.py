"""Plans: how nano-operations are assigned to lanes, SMs and time.

Owns: the plan file and its checks, the shipped plans, the choice among them.
May import: model/ and what lies below it.
Never: launches anything; knows a batch or an operation by its name.
"""
