"""server/daemon."""
