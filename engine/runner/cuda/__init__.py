"""The GPU runner.

Owns: graphs, inputs, layers, executors and collectives of an NVIDIA GPU.
May import: `device/` and below.
Never: chooses options.
"""
