"""`python -m weft.tools.vision.evaluate URL`: asks a server with the demo vision model about new pictures."""

from __future__ import annotations

import argparse
import base64
import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from weft.tools.vision.pictures import Question, png, question

MODEL = Path(__file__).parent / "model"
AT_ONCE = 8


def parts(asked: Question, factor: int) -> list[dict[str, Any]]:
    """Return a message's content. factor: enlarges the pictures."""
    content: list[dict[str, Any]] = []
    for number, picture in enumerate(asked.pictures, 1):
        url = "data:image/png;base64," + base64.b64encode(png(picture.pixels, factor)).decode()
        content += [{"type": "text", "text": str(number)}, {"type": "image_url", "image_url": {"url": url}}]
    return [*content, {"type": "text", "text": asked.text}]


def questions(number: int, seed: int = 2000) -> list[tuple[Question, int]]:
    """Return questions, and the factors that their pictures are enlarged by."""
    rng = np.random.default_rng(seed)
    return [(question(rng), int(rng.integers(1, 13))) for _ in range(number)]


def wrong_answers(url: str, asked: list[tuple[Question, int]]) -> list[str]:
    """Ask over HTTP, several questions at once. Returns the wrong answers."""

    def ask(one: tuple[Question, int]) -> str:
        body = {"messages": [{"role": "user", "content": parts(*one)}], "temperature": 0, "max_tokens": 12}
        request = urllib.request.Request(
            f"{url.rstrip('/')}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=240) as response:
            return str(json.load(response)["choices"][0]["message"]["content"])

    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = list(pool.map(ask, asked))
    return [
        f"{one.text} {answer!r}, not {one.answer!r}"
        for (one, _), answer in zip(asked, answers, strict=True)
        if answer != one.answer
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--questions", type=int, default=200)
    options = parser.parse_args()
    wrong = wrong_answers(options.url, questions(options.questions))
    print("\n".join(wrong))
    print(f"{options.questions - len(wrong)} of {options.questions} answers are right")


if __name__ == "__main__":
    main()
