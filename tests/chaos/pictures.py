"""`ChaosPictures`: a model with vision for the daemon under test, and questions with pictures, usable ones and attacks.

The answers differ from picture to picture, so a client notices when it gets those of another one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import image_model
from customers import CHAT, Question
from hostile_images import ACCEPTED, REFUSED
from image_model import file_of, part, picture

NAME = "eyes"
PICTURES, ODD, ATTACKS, BLIND = 24, 8, 10, 3
LARGEST = 70  # pixels of a side: up to 13 tiles
TOKENS = 8


class ChaosPictures:
    def __init__(self, folder: Path, rng: Random) -> None:
        self._rng = rng
        self.model = image_model.write_checkpoint(folder)

    def questions(self) -> Iterator[Question]:
        """Yield questions of fixed answers: with one picture or several, with files that must be refused, and to a
        model without vision."""
        files = [file_of(picture(self._side(), self._side(), seed=i)) for i in range(PICTURES)]
        for i, file in enumerate(files):
            yield self._question(file, stream=i % 3 == 0)
        for _ in range(PICTURES // 3):
            yield self._question(*self._rng.sample(files, 3))
        for name in self._rng.sample(sorted(ACCEPTED), ODD):
            yield self._question(ACCEPTED[name]())
        for name in self._rng.sample(sorted(REFUSED), ATTACKS):
            yield self._question(self._rng.choice(files), REFUSED[name](), status=400)
        for file in files[:BLIND]:
            yield self._question(file, status=400, model="demo")

    def alike(self, questions: Sequence[Question], answers: Mapping[Question, set[str]]) -> list[str]:
        """What is wrong with the answers as a test: too many are equal."""
        texts = [str(answers[question]) for question in questions if question.status == 200]
        few = len(set(texts)) < len(texts) / 2
        return [f"{len(texts)} answers about pictures have only {len(set(texts))} different texts"] if few else []

    def _side(self) -> int:
        return self._rng.randrange(8, LARGEST)

    def _question(self, *files: bytes, status: int = 200, model: str = NAME, stream: bool = False) -> Question:
        """A text shared by all questions comes first, so that they share cached pages."""
        parts: list[Any] = [{"type": "text", "text": "see what is there, and then say what it is: "}]
        for i, file in enumerate(files):
            parts += [part(file), {"type": "text", "text": f" {i} "}]
        fields = {"messages": [{"role": "user", "content": parts}], "max_tokens": TOKENS, "temperature": 0}
        return Question(CHAT, {**fields, "model": model, "ignore_eos": True, "stream": stream}, status)
