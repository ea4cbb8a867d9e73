"""Text: to token ids, and back as they come.

Owns: the tokenizer, incremental detokenizers, stop strings, truncation, log-probabilities as clients see them.
May import: the ground files of server/, engine/wire.
Never: knows an endpoint or a request's life; imports torch.
"""
