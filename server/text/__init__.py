"""server/text."""
