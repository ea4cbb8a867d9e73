"""Models as `transformers` has them: any decoder whose attention goes through its attention interface.

Owns: the hook in that interface, what a dry run finds out, loading such a model, why one cannot be served.
May import: what model/ may, and `transformers`.
Never: assumes what a model does from its name; runs code from a checkpoint that nobody trusted.
"""
