"""Drafts on real text: SmolLM2's acceptance equals a replay of its text, and that of `transformers`' prompt lookup."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from real_models import SMOLLM2, SmolLM2, model_file

from weft.engine.config import EngineConfig
from weft.engine.engine import Engine
from weft.engine.model.hub import find_model
from weft.engine.scheduling.text_draft import ngram_draft
from weft.engine.wire.messages import AddRequest
from weft.engine.wire.sampling import SamplingParams

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

OUTPUT = 64
LOOKUP = '{"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_min": 1, "prompt_lookup_max": 3}'
CODE = """Print this code again with a comment on each function.

def area(width, height):
    if width < 0 or height < 0:
        raise ValueError("a side must not be negative")
    return width * height


def border(width, height):
    if width < 0 or height < 0:
        raise ValueError("a side must not be negative")
    return 2 * (width + height)
"""


def replayed(prompt: list[int], output: list[int]) -> tuple[int, int, int]:
    """Iterations after the prompt's, draft tokens and accepted tokens of a text that is known."""
    text, known = np.array(prompt + output, np.int32), len(prompt) + 1
    iterations = drafted = accepted = 0
    while known < len(text):
        draft = ngram_draft(text[:known], min(8, len(text) - known - 1), shortest=1, longest=3).tokens
        right = next((i for i, token in enumerate(draft) if token != text[known + i]), len(draft))
        iterations, drafted, accepted = iterations + 1, drafted + len(draft), accepted + right
        known += right + 1
    return iterations, drafted, accepted


def test_acceptance_is_that_of_a_replay_and_of_transformers(tmp_path_factory: pytest.TempPathFactory) -> None:
    model = SmolLM2(model_file(SMOLLM2, tmp_path_factory.mktemp("model")))
    prompt = model.chat_ids({"role": "user", "content": CODE})
    there = str(find_model(str(model.file), None, weights=True))
    options = {
        "device": "cpu",
        "dtype": "float32",
        "quantization": "none",
        "max_model_len": 512,
        "max_num_seqs": 1,
        "cpu_threads": 1,
    }
    engine = Engine(EngineConfig(model=there, speculative_config=LOOKUP, **options))
    params = SamplingParams(max_tokens=OUTPUT, temperature=0.0, ignore_eos=True)
    engine.add(AddRequest(handle=1, prompt_token_ids=np.array(prompt, np.int32).tobytes(), params=params))
    output: list[int] = []
    while engine.has_work:
        if (outputs := engine.step()) is not None:
            output += [token for token in outputs.columns()[1].tolist() if token >= 0]
    stats = engine.stats()
    engine.close()
    model.assert_greedy(prompt, output)
    figures = stats.speculation
    counted = stats.iterations - 1, figures.draft_tokens["text"], figures.accepted_tokens["text"]
    assert counted == replayed(prompt, output)
    assert len(output) / counted[0] > 1.5

    passes = []
    hook = model.oracle.register_forward_hook(lambda *_: passes.append(1))
    looked_up = model.oracle.generate(
        torch.tensor([prompt]), do_sample=False, min_new_tokens=OUTPUT, max_new_tokens=OUTPUT,
        prompt_lookup_num_tokens=8, max_matching_ngram_size=3,
    )  # fmt: skip
    hook.remove()
    assert looked_up[0, len(prompt) :].tolist() == output
    # There the prompt's pass verifies drafts already.
    assert abs(len(passes) - stats.iterations) <= 1
