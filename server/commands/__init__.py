"""Commands around a server: `weft chat`, `batch`, `pull`, `models`, `doctor`, `health`, `completion`.

Owns: their output and prompts.
May import: the ground files of server/, batches/, observe/; loadgen's connections; engine/ lazily, from the command
line alone.
Never: answers a request; is imported by anything that serves.
"""
