"""The corpus, tokenizer, network, training and evaluation of the embedded demo model."""
