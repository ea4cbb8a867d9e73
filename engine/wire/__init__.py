"""What crosses the socket between API processes and the engine, and both ends of it.

Owns: the messages and their codec, `SamplingParams`, grammar texts, token streams, the engine's spawn and socket, the
log lines of a process.
May import: the ground files of engine/. No torch: API processes import this wing.
Never: schedules, knows a page or a device; unpickles anything.
"""
