"""What a chat template, tools and structured output make of a request and of an answer.

Owns: tool formats and their parsers, JSON schema and grammar fields, the process that tries grammars, variables of
templates.
May import: text/ and what lies below it; engine/wire (grammars).
Never: talks to the engine; executes a tool.
"""
