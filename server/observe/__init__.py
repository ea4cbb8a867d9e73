"""server/observe."""
