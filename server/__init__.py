"""HTTP, server-sent events, text, metrics and the `weft` command.

Owns: API processes, the daemon, and every subcommand of `weft`.
May import: engine/ (while it serves, only wire, config and errors); for subcommands also autosearch/ and loadgen/.
Never: imports kernels/; imports torch to serve.
"""
