"""Requests, pages, batches, models and devices. Speaks tokens in, tokens out; knows no HTTP and no text."""
