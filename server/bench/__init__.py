"""server/bench."""
