"""Tool calls, structured outputs and chat template variables.

Owns: tool formats and their parsers, JSON schema and grammar fields, the process that checks grammars, template
variables.
May import: text/ and what lies below it; engine/wire (grammars).
Never: talks to the engine; executes a tool.
"""
