"""Kernel benches, sweeps and table makers. Not part of the installed package."""
