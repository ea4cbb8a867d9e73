"""Encoders: embedders and rerankers whose tokens see both sides. They have no KV pages.

Owns: the module on its device, batches of whole sequences, their queue, and the engine around them.
May import: everything in engine/ but `engine.py`, `llm.py` and `process.py`.
Never: splits a sequence, or keeps anything of it after its answer.
"""
