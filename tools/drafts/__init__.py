"""Training of EAGLE-3 heads that draft for a model."""
