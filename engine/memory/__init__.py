"""engine/memory."""
