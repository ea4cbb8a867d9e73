"""The protocol between API processes and the engine, and both ends of its socket.

Owns: the messages and their codec, `SamplingParams`, grammar texts, token streams, the engine's process and socket,
log output.
May import: the ground files of engine/. No torch, because API processes import this package.
Never: schedules, knows pages or devices, unpickles anything.
"""
