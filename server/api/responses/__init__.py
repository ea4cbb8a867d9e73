"""The Responses API: its bodies and items, the events of an answer, what is stored, what goes on in the background."""
