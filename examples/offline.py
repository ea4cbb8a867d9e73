"""Runs the engine in this process, without HTTP: a chat, a completion, several prompts at once.

Run it:  python examples/offline.py [MODEL]        (MODEL: a model directory; default: the embedded demo model)
"""

from __future__ import annotations

import sys

from weft import LLM, SamplingParams


def main() -> None:
    llm = LLM(sys.argv[1] if len(sys.argv) > 1 else "demo", progress=False)

    # Chat with the model's chat template.
    (answer,) = llm.chat([{"role": "user", "content": "What is 123 + 456?"}], progress=False)
    print("chat:", answer.text)

    # Complete raw text. Greedy decoding gives the same tokens for the same prompt.
    greedy = SamplingParams(temperature=0, max_tokens=8)
    (counted,) = llm.generate("1 2 3 4", greedy, progress=False)
    print("completion:", counted.text.strip(), f"({counted.finish_reason} after {len(counted.token_ids)} tokens)")

    # Run several prompts in one batch; each can have its own parameters.
    words = ["pear apple fig", "kiwi plum cherry"]
    conversations = [[{"role": "user", "content": f"Sort these words: {w}"}] for w in words]
    for asked, completion in zip(words, llm.chat(conversations, progress=False), strict=True):
        print(f"sorted: {asked} -> {completion.text}")
    llm.close()


if __name__ == "__main__":
    main()
