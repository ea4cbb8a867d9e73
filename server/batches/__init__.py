"""Requests by the file: the lines of OpenAI's batches, and the files and batches that a daemon keeps on its disk.

Owns: the form of a batch's lines, the folder of `--files-dir`, what runs the batches in it.
May import: the ground files of server/.
Never: knows HTTP or ASGI; asks the engine by itself.
"""
