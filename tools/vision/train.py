"""Trains the demo vision model: `python -m weft.tools.vision.train FOLDER`. It takes about ten minutes on one core.

The model has Idefics3's shape. First, linear heads on the embeddings teach the tower digits and colours. Then the whole
model learns to answer questions.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import Idefics3Config, Idefics3ForConditionalGeneration

from weft.tools.vision.pictures import COLOURS, SIDE, Picture, Question, enlarged, picture, question

SPECIAL = ("<pad>", "<s>", "</s>", "<image>", "<fake_token_around_image>", "<global-img>")
PAD, BOS, EOS, IMAGE, FAKE, GLOBAL = range(len(SPECIAL))
CHARACTERS = " 0123456789abcdefghijklmnopqrstuvwxyz?\n"
IDS = {character: len(SPECIAL) + i for i, character in enumerate(CHARACTERS)}
VOCABULARY = 64
PATCH, JOINED = 8, 2  # pixels of a patch's side; patches per side of an embedding
TOKENS = (SIDE // PATCH // JOINED) ** 2
NOTHING = 10  # class of a place without a digit
BATCH = 64
TEMPLATE = """\
{{- '<s>' -}}
{%- for message in messages -%}
{%- if message.content is string -%}{{ message.content }}
{%- else -%}
{%- for part in message.content -%}{{ '<image>' if part.type == 'image' else part.text }}{%- endfor -%}
{%- endif -%}
{%- endfor -%}"""
IMAGE_PROCESSOR = {
    "image_processor_type": "Idefics3ImageProcessor",
    "do_resize": True,
    "do_image_splitting": False,
    "do_rescale": True,
    "do_normalize": True,
    "rescale_factor": 1 / 255,
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
    "size": {"longest_edge": SIDE},
    "max_image_size": {"longest_edge": SIDE},
}


def network() -> Idefics3ForConditionalGeneration:
    tokens = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}
    vision = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 3}
    text = {
        "model_type": "llama", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3,
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": VOCABULARY,
        "max_position_embeddings": 1024, "tie_word_embeddings": True, **tokens,
    }  # fmt: skip
    config = Idefics3Config(
        image_token_id=IMAGE, scale_factor=JOINED, tie_word_embeddings=True, text_config=text, pad_token_id=PAD,
        vision_config={**vision, "image_size": SIDE, "patch_size": PATCH},
    )  # fmt: skip
    config.bos_token_id, config.eos_token_id = BOS, EOS
    model = Idefics3ForConditionalGeneration(config)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and "embed" not in name:
            nn.init.normal_(parameter, std=0.8 * parameter.shape[-1] ** -0.5)
    return model


def pixels_of(pictures: Sequence[Picture], rng: np.random.Generator) -> Tensor:
    """Return `[n, 3, SIDE, SIDE]`, normalised. Half of the pictures are enlarged and made smaller again, as clients'
    pictures are."""
    made = []
    for one in pictures:
        pixels = one.pixels
        if rng.random() < 0.5:
            large = Image.fromarray(enlarged(pixels, int(rng.integers(2, 9))))
            pixels = np.asarray(large.resize((SIDE, SIDE), Image.Resampling.LANCZOS))
        made.append(pixels)
    return torch.from_numpy(np.stack(made)).permute(0, 3, 1, 2).float() / 127.5 - 1


def prompt_ids(asked: Question) -> list[int]:
    ids = [BOS]
    for number in range(1, len(asked.pictures) + 1):
        ids += [IDS[str(number)], FAKE, GLOBAL, *[IMAGE] * TOKENS, FAKE]
    return ids + [IDS[character] for character in asked.text]


def embeddings(model: Any, pixels: Tensor) -> Tensor:
    states = model.model.vision_model(pixel_values=pixels).last_hidden_state
    found: Tensor = model.model.connector(states)
    return found


def batch(rng: np.random.Generator, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids `[size, length]`, labels of the same shape (-100: no answer) and the pixels of all pictures."""
    asked = [question(rng) for _ in range(size)]
    rows = [(prompt_ids(one), [*(IDS[character] for character in one.answer), EOS]) for one in asked]
    length = max(len(prompt) + len(answer) for prompt, answer in rows)
    ids, labels = torch.full((size, length), PAD), torch.full((size, length), -100)
    for i, (prompt, answer) in enumerate(rows):
        ids[i, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
        labels[i, len(prompt) : len(prompt) + len(answer)] = torch.tensor(answer)
    return ids, labels, pixels_of([one for each in asked for one in each.pictures], rng)


def logits_of(model: Any, ids: Tensor, pixels: Tensor) -> Tensor:
    inputs = model.get_input_embeddings()(ids)
    inputs = inputs.masked_scatter((ids == IMAGE)[..., None], embeddings(model, pixels))
    found: Tensor = model.lm_head(model.model.text_model(inputs_embeds=inputs, use_cache=False).last_hidden_state)
    return found


class Schedule:
    """A number of steps of an optimiser: a short rise of the learning rate, and a fall over the second half."""

    def __init__(self, parameters: Sequence[Tensor], peak: float, steps: int) -> None:
        self._optimiser = torch.optim.AdamW(parameters, lr=peak, weight_decay=0.02, betas=(0.9, 0.98))
        self._parameters, self._peak, self.steps = parameters, peak, steps
        self.step = 0

    def update(self, loss: Tensor) -> None:
        self.step += 1
        rate = self._peak * min(1, self.step / 100) * min(1, 2 * (1 - self.step / (self.steps + 1)))
        for group in self._optimiser.param_groups:
            group["lr"] = rate
        self._optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self._parameters, 1.0)
        self._optimiser.step()


def teach_tower(model: Any, steps: int) -> None:
    rng, names = np.random.default_rng(5), list(COLOURS)
    heads = nn.Linear(model.config.text_config.hidden_size, 11 + len(names) + 1)
    schedule = Schedule(
        [*model.model.vision_model.parameters(), *model.model.connector.parameters(), *heads.parameters()],
        2e-3, steps,
    )  # fmt: skip
    while schedule.step < steps:
        seen = [picture(rng) for _ in range(BATCH)]
        digits = torch.tensor([[NOTHING if c is None else c[0] for c in one.cells] for one in seen])
        colours = torch.tensor([[len(names) if c is None else names.index(c[1]) for c in one.cells] for one in seen])
        found = heads(embeddings(model, pixels_of(seen, rng)))
        loss = cross_entropy(found[..., :11].flatten(0, 1), digits.flatten())
        loss = loss + cross_entropy(found[..., 11:].flatten(0, 1), colours.flatten())
        schedule.update(loss)
        if schedule.step % 100 == 0:
            right = (found[..., :11].argmax(-1) == digits).float().mean()
            print(f"tower: step {schedule.step}, loss {loss:.3f}, digits {right:.2f}", flush=True)


def teach_answers(model: Any, steps: int) -> None:
    rng = np.random.default_rng(1)
    schedule = Schedule(list(model.parameters()), 1.5e-3, steps)
    while schedule.step < steps:
        ids, labels, pixels = batch(rng, BATCH)
        logits = logits_of(model, ids, pixels)[:, :-1]
        loss = cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        schedule.update(loss)
        if schedule.step % 50 == 0:
            print(f"answers: step {schedule.step}, loss {loss:.3f}, exact {exact(logits, labels):.2f}", flush=True)


def exact(logits: Tensor, labels: Tensor) -> float:
    wanted = labels[:, 1:]
    return float(((logits.argmax(-1) == wanted) | (wanted == -100)).all(1).float().mean())


def save(model: Any, folder: Path) -> None:
    """Write a checkpoint in bfloat16, with a tokenizer of characters and a chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(folder)
    names = [*SPECIAL, *CHARACTERS]
    names += [f"<unused{i}>" for i in range(VOCABULARY - len(names))]
    added = [
        {"id": i, "content": name, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": True}
        for i, name in enumerate(SPECIAL)
    ]  # fmt: skip
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "[\\s\\S]"}, "behavior": "Isolated", "invert": False},
        "post_processor": None, "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": {name: i for i, name in enumerate(names)}, "unk_token": "<pad>"},
    }  # fmt: skip
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>",
        "clean_up_tokenization_spaces": False,
    }  # fmt: skip
    for name, content in (
        ("tokenizer.json", tokenizer), ("tokenizer_config.json", settings),
        ("preprocessor_config.json", IMAGE_PROCESSOR),
    ):  # fmt: skip
        (folder / name).write_text(json.dumps(content, indent=1) + "\n")
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tower-steps", type=int, default=400)
    parser.add_argument("--answer-steps", type=int, default=800)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = network()
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    teach_tower(model, options.tower_steps)
    teach_answers(model, options.answer_steps)
    with torch.no_grad():
        held = [batch(np.random.default_rng(900 + i), BATCH) for i in range(8)]
        right = [exact(logits_of(model, ids, pixels)[:, :-1], labels) for ids, labels, pixels in held]
        swapped = [exact(logits_of(model, ids, pixels.flip(0))[:, :-1], labels) for ids, labels, pixels in held]
    print(f"new questions: {np.mean(right):.1%} right, with the pictures swapped {np.mean(swapped):.1%}")
    save(model, options.folder)


if __name__ == "__main__":
    main()
