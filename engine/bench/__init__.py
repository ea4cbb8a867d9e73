"""engine/bench."""
