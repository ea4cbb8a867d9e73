"""`python -m weft.tools.bench.images`: a model of Qwen2.5-VL-7B's shape with dummy weights, with images and with text.

Requests have an image of 1,024 x 1,024 pixels and 128 tokens, or as many tokens of text, and get 128 tokens. The time
to decode files is not part of it.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from weft.engine.config import EngineConfig, Share
from weft.engine.engine import Engine
from weft.engine.images.qwen_vl import QwenVLRule
from weft.engine.wire.messages import AddRequest, Image
from weft.engine.wire.pixels import PixelShelf
from weft.engine.wire.sampling import SamplingParams

PLACEHOLDER, TEXT_TOKENS, OUT = 151655, 128, 128
TEXT = {
    "model_type": "qwen2_5_vl_text", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
    "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064, "max_position_embeddings": 128000,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "mrope_section": [16, 24, 24], "rope_theta": 1000000.0},
}  # fmt: skip
VISION = {
    "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 3584,
    "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31],
}  # fmt: skip
TINY: dict[str, dict[str, Any]] = {
    "text_config": {
        **TEXT, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
        "head_dim": 64, "rope_parameters": {**TEXT["rope_parameters"], "mrope_section": [8, 12, 12]},  # type: ignore[dict-item]
    },
    "vision_config": {**VISION, "depth": 2, "hidden_size": 64, "intermediate_size": 96, "num_heads": 4,
                      "out_hidden_size": 256, "fullatt_block_indexes": [1]},
}  # fmt: skip


def write_model(folder: Path, *, tiny: bool) -> None:
    config = {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl", "dtype": "bfloat16",
        "image_token_id": PLACEHOLDER, "video_token_id": 151656, "vision_start_token_id": 151652,
        "vision_end_token_id": 151653, "text_config": TEXT, "vision_config": VISION, **(TINY if tiny else {}),
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps({"patch_size": 14, "merge_size": 2}))


class Bench:
    def __init__(self, model: Path, shelf: PixelShelf, side: int, options: dict[str, Any]) -> None:
        self._shelf, self._rng, self._handle = shelf, np.random.default_rng(0), 0
        config = json.loads((model / "config.json").read_bytes())
        rule = QwenVLRule(
            config, json.loads((model / "preprocessor_config.json").read_bytes()), lambda _: [PLACEHOLDER]
        )
        self.plan = rule.plan(side, side, "auto")
        self.engine = Engine(
            EngineConfig(
                model=str(model), load_format="dummy", prefix_caching=False, share=Share(pixels=str(shelf.directory)),
                **options,
            )
        )  # fmt: skip

    def add(self, tokens: int, images: int, out: int = OUT) -> None:
        """Add a request with this many tokens of text, and new images of noise."""
        ids = self._rng.integers(0, 150000, tokens).tolist()
        given = []
        for _ in range(images):
            ((height, width),) = self.plan.shapes
            pixels = self._rng.integers(0, 256, (height, width, 3), np.uint8).tobytes()
            file, length = self._shelf.put(1, [pixels]), self.plan.num_embeddings
            given.append(
                Image(self._rng.bytes(32), len(ids), b"", length, file, ((height, width),), tuple(self.plan.grid))
            )
            ids += [PLACEHOLDER] * length
        ids.append(1)
        self.engine.add(
            AddRequest(
                handle=self._handle, prompt_token_ids=np.array(ids, np.int32).tobytes(), images=tuple(given),
                params=SamplingParams(max_tokens=out, temperature=0.0, ignore_eos=True),
            )
        )  # fmt: skip
        self._handle += 1

    def run(self) -> tuple[float, float, list[float]]:
        """Run until no request is left. Returns the seconds, those to the first token, and the seconds between
        iterations."""
        begin = last = time.perf_counter()
        first, gaps = 0.0, []
        while self.engine.has_work:
            outputs = self.engine.step()
            if outputs is not None and (outputs.columns()[1] >= 0).any():
                now = time.perf_counter()
                first = first or now - begin
                gaps.append(now - last)
                last = now
        return time.perf_counter() - begin, first, gaps


def measure(bench: Bench, requests: int, tokens: Sequence[tuple[str, int, int]]) -> None:
    for name, text, images in tokens:
        firsts = []
        for _ in range(5):
            bench.add(text, images, 1)
            firsts.append(bench.run()[1])
        print(
            f"{name}: TTFT of one request {np.median(firsts) * 1e3:.1f} ms (of {['%.0f' % (f * 1e3) for f in firsts]})"
        )
        before = bench.engine.stats().images
        for _ in range(requests):
            bench.add(text, images)
        seconds, _, gaps = bench.run()
        after = bench.engine.stats().images
        assert before is not None
        assert after is not None
        encoder = after.seconds - before.seconds
        prompt = text + 1 + images * bench.plan.num_embeddings
        print(
            f"{name}: {requests} requests of {prompt} + {OUT} tokens in {seconds:.2f} s: {requests / seconds:.2f} "
            f"requests/s, {requests * OUT / seconds:.0f} output tokens/s; encoder {encoder:.2f} s "
            f"({encoder / seconds:.1%}), {after.encoded - before.encoded} images, failed {after.failures}; longest gap "
            f"{max(gaps) * 1e3:.0f} ms",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--side", type=int, default=1024)
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try this script")
    parser.add_argument("--options", default="{}", help="options of the engine, as JSON")
    given = parser.parse_args()
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), tiny=given.tiny)
        shelf = PixelShelf.make(1 << 34)
        try:
            bench = Bench(Path(folder), shelf, given.side, json.loads(given.options))
            print(f"ready after {time.perf_counter() - begin:.1f} s; {bench.plan.num_embeddings} embeddings an image")
            same = TEXT_TOKENS + bench.plan.num_embeddings
            measure(
                bench, given.requests, [("images", TEXT_TOKENS, 1), ("text", same, 0), ("images again", TEXT_TOKENS, 1)]
            )
        finally:
            shelf.close()


if __name__ == "__main__":
    main()
