"""Streams a chat answer with the `openai` client, and prints usage and latency.

Start a daemon (`weft serve`, or `make serve` in a checkout), then
run it:  python examples/streaming.py [URL] ["a question"]        (needs: pip install openai)
"""

from __future__ import annotations

import sys
import time

from openai import OpenAI


def main() -> None:
    url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
    question = sys.argv[2] if len(sys.argv) > 2 else "Count from 1 to 9"
    client = OpenAI(base_url=f"{url}/v1", api_key="only needed if the daemon runs with --api-key")
    model = client.models.list().data[0].id

    begin = time.perf_counter()
    first = 0.0
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        temperature=0,
        max_tokens=64,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        for choice in chunk.choices:
            if choice.delta.content:
                first = first or time.perf_counter()
                print(choice.delta.content, end="", flush=True)
        if chunk.usage is not None:  # the last chunk has usage and no choice
            usage = chunk.usage
            print(f"\n{usage.prompt_tokens} tokens in, {usage.completion_tokens} out")
    print(f"first token after {1e3 * (first - begin):.0f} ms, all after {1e3 * (time.perf_counter() - begin):.0f} ms")


if __name__ == "__main__":
    main()
