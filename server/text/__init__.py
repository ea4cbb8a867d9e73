"""Conversion between text and token ids, including incremental detokenization.

Owns: the tokenizer, incremental detokenizers, stop strings, truncation, formats of log-probabilities.
May import: the top-level files of server/, engine/wire.
Never: depends on endpoints or on the life of a request; imports torch.
"""
