"""HTTP, server-sent events, text, metrics and the `weft` command."""
