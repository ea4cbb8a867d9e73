"""Simulates a fleet in virtual time, to find how many GPUs a load needs and in which configuration.

Owns: iteration profiles, the clock, engines with iteration times from a profile, traffic, the search, reports.
May import: what deploy/ may; scheduler, router and load generator are the real ones.
Never: is imported by another folder; reads a real clock during a simulation.
"""
