"""Measurements of published papers, repeated with this engine: `weft bench batching` and `weft bench ranks`."""
