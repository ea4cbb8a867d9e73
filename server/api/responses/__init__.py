"""The Responses API.

Owns: bodies, items, events, stored responses and conversations, background responses.
May import: the rest of server/api/ except `app.py`, and what server/api/ may import.
Never: is imported by another API format; chat and messages work without it.
"""
