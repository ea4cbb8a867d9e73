"""The embedded demo model: a small Llama that answers simple questions exactly.

`weft demo train` makes it from generated text (`tools/demo/`). It lets anyone try the daemon without a download, and it
lets a test check answers: a wrong KV page makes a wrong answer.

Owns: the shipped model.
May import: nothing of weft.
Never: is needed to serve another model.
"""

from pathlib import Path

MODEL_PATH: Path = Path(__file__).resolve().parent / "model"
"""Directory of the shipped model, in the layout of the Hugging Face hub."""

__all__ = ["MODEL_PATH"]
