"""Plans: how nano-operations are assigned to lanes, SMs and time.

Owns: the plan file and its checks, the shipped plans, the choice among them.
May import: model/ and the packages below it.
Never: launches anything, or depends on a batch or on an operation's name.
"""
