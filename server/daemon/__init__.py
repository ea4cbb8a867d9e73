"""`weft serve` as processes: start, supervision, signals, exit status, and the `weft` command.

Owns: the engine and API processes, the port, the messages between them, the subcommands.
May import: everything in server/; engine/, autosearch/ and loadgen/ lazily, from the command line alone.
Never: answers a request.
"""
