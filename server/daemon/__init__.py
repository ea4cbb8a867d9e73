"""`weft serve` as processes: start, supervision, signals, exit status, and the `weft` command.

Owns: the engine process and API workers, the port, control between them, the sub-commands.
May import: everything in server/; engine/, autosearch/ and loadgen/ lazily, from the command line alone.
Never: answers a request.
"""
