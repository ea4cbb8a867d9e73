"""Images in requests: where they come from, their decoding, their place in the prompt.

Owns: image parts, fetching and its address rules, decoder processes, limits, prepared images.
May import: its own package, and those below api. No torch.
Never: decodes an image in this process, connects to an address it has not checked, hands a client's string to a library
that could open it.
"""
