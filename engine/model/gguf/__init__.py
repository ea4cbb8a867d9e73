"""GGUF files of llama.cpp: a file becomes a model directory, while its weights stay in the file.

Owns: the meaning of the metadata, the mapping to tensor names of Hugging Face checkpoints, dequantizing blocks.
May import: the rest of model/ except `weights.py` and `hub.py`; the `gguf` library, and `transformers` for tokenizers.
Never: depends on a device's kernels, or writes next to the file.
"""
