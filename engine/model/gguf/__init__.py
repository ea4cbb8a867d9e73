"""GGUF files, as llama.cpp's users have them: such a file becomes a model directory, whose weights stay in the file.

Owns: what their metadata means, which of their tensors stands for which of a Hugging Face checkpoint, and how blocks
become numbers.
May import: the rest of model/ but for `weights.py` and `hub.py`; the `gguf` library, and `transformers` for tokenizers.
Never: knows a device's kernels; writes beside the file.
"""
