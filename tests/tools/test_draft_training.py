"""The head that is trained computes what a served head drafts, and a trained one is served."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from weft.tools.drafts.head import Head, HeadShape
from weft.tools.drafts.train import Plan, train

sys.path.append(str(Path(__file__).parent.parent / "engine"))
import draft_heads

SHAPE = HeadShape(256, 96, 4, 2, 16, 2048, 500, 1e-5, 10000.0, 2048, (2, 3, 4))


def test_each_step_of_training_is_a_step_of_drafting() -> None:
    torch.manual_seed(0)
    config = {**SHAPE.config(), "eagle_aux_hidden_state_layer_ids": [2, 3, 4]}
    tensors = draft_heads.tensors_of(config)
    ids = tensors["d2t"] + torch.arange(500)
    embedding, states = torch.randn(2048, 256), [torch.randn(9, 256) for _ in range(5)]
    text = [3, 77, 500, 1999, 12, 12, 640]
    with torch.no_grad():
        head = Head(SHAPE, ids, embedding)
        head.load_state_dict({name: tensor for name, tensor in tensors.items() if name != "d2t"})
        drafted = draft_heads.drafted(config, tensors, embedding, [each[:6] for each in states], text, 4)
        whole = torch.tensor([text + drafted[:3]])
        # Later steps must not see the model's states after the newest token.
        given = torch.cat(states[2:5], -1)[None]
        logits = head(embedding[whole[:, 1:]], given, 4)
    assert [int(ids[each[0, 5 + step].argmax()]) for step, each in enumerate(logits)] == drafted
    assert head.tensors().keys() == tensors.keys()
    assert torch.equal(head.tensors()["d2t"], tensors["d2t"])


@pytest.mark.slow
@pytest.mark.nightly
def test_a_short_training_gives_a_head_that_is_served(tmp_path: Path) -> None:
    plan = Plan(3000, 1, 1024, 1e-3, 1000, 0.8, 0, "cpu")
    card = train("demo", tmp_path / "head", plan, measured=4)
    assert card["greedy"][0] >= 1.0
    assert card["vocabulary"] == 1000
    assert "acceptance length" in (tmp_path / "head" / "README.md").read_text()
