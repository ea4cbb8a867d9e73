"""The Responses API: bodies, items, events, stored responses and background responses."""
