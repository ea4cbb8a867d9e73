"""`weft bench server`: streams to API processes from an engine that computes nothing."""
