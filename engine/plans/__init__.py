"""engine/plans."""
