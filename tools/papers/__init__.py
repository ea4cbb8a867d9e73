"""Measurements of published papers, repeated with this engine: `weft bench batching`, `ranks` and `formulas`."""
