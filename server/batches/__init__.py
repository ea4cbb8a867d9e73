"""OpenAI's batch API: the lines of batch files, and the files and batches that a daemon stores on disk.

Owns: the format of batch lines, the folder of `--files-dir`, the runner of its batches.
May import: the top-level files of server/.
Never: depends on HTTP or ASGI; calls the engine directly.
"""
