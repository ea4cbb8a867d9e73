"""engine/scheduling."""
