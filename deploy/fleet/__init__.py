"""A fleet in virtual time: how many GPUs a load needs, in which configuration.

Owns: iteration profiles, the clock, engines whose iterations take what a profile says, traffic, the search, reports.
May import: everything below: the scheduler, the router and the load generator are the real ones.
Never: is imported by another folder; reads a clock of this machine while it simulates.
"""
