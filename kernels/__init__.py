"""Operations on tensors: a torch twin for every kernel.

Twins are in `reference.py` and `sampling.py`, kernels in files named after their nouns. A kernel's leading parameters
are its twin's; what only a GPU has comes after them, by keyword. Attention has several back ends behind one interface,
`attention.py`.
"""
