"""engine/wire."""
