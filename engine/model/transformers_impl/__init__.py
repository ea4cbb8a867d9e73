"""Models that `transformers`' code computes: any decoder that uses its attention interface.

Owns: the hook in that interface, the dry run, loading such a model, and the reasons why one cannot be served.
May import: what model/ may, and `transformers`.
Never: infers a model's behavior from its name, or runs untrusted code from a checkpoint.
"""
