"""Trains an EAGLE-3 head that drafts for a model: `python -m weft.tools.drafts.train BASE OUT`.

BASE is a safetensors checkpoint of a Llama with a chat template, or `demo`. The head learns from text that the model
itself writes: answers to the demo's exercises, or, for another model, both turns of a conversation. OUT gets the head
and a card with its acceptance lengths. The text is kept out of OUT.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from weft.engine.demo import MODEL_PATH
from weft.engine.llm import LLM
from weft.engine.wire.sampling import SamplingParams
from weft.tools.demo.corpus import prompt_ids
from weft.tools.demo.skills import SKILLS, draw, held_out
from weft.tools.drafts.head import Head, HeadShape

STEPS = 3
"""Steps of drafting that training rehearses. Each loss counts `DECAY` times the one before it."""
DECAY = 0.8
DEPTH = 4  # drafts per iteration when acceptance is measured
MARK = "@weft@"
Text = tuple[list[int], list[int]]
"""Token ids of a prompt and of the model's answer."""


@dataclass(frozen=True)
class Plan:
    tokens: int  # that the model writes
    epochs: int
    batch_tokens: int
    rate: float
    vocabulary: int  # draft tokens at most
    temperature: float
    seed: int
    device: str
    longest: int = 256  # tokens of an answer at most


def demo_prompts(llm: LLM, number: int, *, unseen: bool, seed: int) -> list[list[int]]:
    """Return exercises of all skills in turn."""
    tokenizer = llm.tokenizer.backend_tokenizer
    random = Random(seed)
    if unseen:
        each = -(-number // len(SKILLS))
        examples = [example for skill in SKILLS if skill != "chat" for example in held_out(skill, each, seed)]
        random.shuffle(examples)
    else:
        examples = [draw(SKILLS[i % len(SKILLS)], random) for i in range(number)]
    return [ids for example in examples[:number] if len(ids := prompt_ids(tokenizer, example)) < 300]


def own_prompts(llm: LLM, number: int, *, longest: int, seed: int) -> list[list[int]]:
    """Let the model write users' turns, from the beginning of its chat template on."""
    render = llm.tokenizer.apply_chat_template
    opening = str(render([{"role": "user", "content": MARK}], tokenize=False)).partition(MARK)[0]
    ids = llm.tokenizer.encode(opening, add_special_tokens=False)
    asked = llm.generate(
        [ids] * number,
        [SamplingParams(max_tokens=longest, temperature=1.0, top_p=0.95, seed=seed + i) for i in range(number)],
    )
    turns = ([{"role": "user", "content": each.text.strip()}] for each in asked if each.text.strip())
    return [list(render(turn, add_generation_prompt=True, tokenize=True, return_dict=False)) for turn in turns]


def prompts_of(
    llm: LLM, base: str, number: int, plan: Plan, *, unseen: bool = False, turn: int = 0
) -> list[list[int]]:  # fmt: skip
    """Return prompts for the model. Each `turn` has others."""
    seed = plan.seed + 1000 * turn
    if base == "demo":
        return demo_prompts(llm, number, unseen=unseen, seed=seed)
    return own_prompts(llm, number, longest=min(96, plan.longest), seed=seed + (1 << 20 if unseen else 0))


def written(llm: LLM, base: str, plan: Plan) -> list[Text]:
    """Return text that the model writes, about as many tokens as planned; half of it greedily."""
    texts: list[Text] = []
    done, turn = 0, 0
    while done < plan.tokens:
        number = max(4, min(512, (plan.tokens - done) // 100))
        prompts = prompts_of(llm, base, number, plan, turn=turn)
        params = [
            SamplingParams(
                max_tokens=plan.longest, temperature=plan.temperature if i % 2 else 0.0, seed=turn * 10_000 + i
            )
            for i in range(len(prompts))
        ]
        for prompt, answer in zip(prompts, llm.generate(prompts, params), strict=True):
            texts.append((prompt, list(answer.token_ids)))
            done += len(prompt) + len(answer.token_ids)
        turn += 1
        _show(f"{done} tokens written")
    return texts


def draft_ids(texts: Sequence[Text], vocab_size: int, most: int) -> Tensor:
    """Return the tokens that answers use most, ascending; all if they are few."""
    if most >= vocab_size:
        return torch.arange(vocab_size)
    counts = torch.bincount(torch.tensor([token for _, answer in texts for token in answer]), minlength=vocab_size)
    return counts.topk(most).indices.sort().values


def batches(texts: Sequence[Text], plan: Plan, random: Random) -> Iterator[list[Text]]:
    """Yield batches of texts of similar length, in any order."""
    order = sorted(texts, key=lambda text: len(text[0]) + len(text[1]) + random.random())
    made: list[list[Text]] = [[]]
    for text in order:
        longest = len(text[0]) + len(text[1])
        if made[-1] and (len(made[-1]) + 1) * longest > plan.batch_tokens:
            made.append([])
        made[-1].append(text)
    random.shuffle(made)
    yield from made


def losses(head: Head, model: Any, texts: Sequence[Text]) -> tuple[Tensor, list[float]]:
    """Return the loss of a batch, and the share of right drafts at each step."""
    device = head.fc.weight.device
    ids = pad_sequence([torch.tensor(prompt + answer) for prompt, answer in texts], batch_first=True).to(device)
    # A token before an answer's is predicted; so is what follows the answer's last token only if it is known.
    answers = torch.zeros_like(ids, dtype=torch.bool)
    for row, (prompt, answer) in enumerate(texts):
        answers[row, len(prompt) - 1 : len(prompt) + len(answer) - 1] = True
    with torch.no_grad():
        seen = model(ids, output_hidden_states=True)
        states = torch.cat([seen.hidden_states[tap] for tap in head.shape.taps], -1)[:, :-1].float()
        wanted = seen.logits[:, 1:, head.ids].float().softmax(-1)
        best = seen.logits[:, 1:].argmax(-1)
        embedded = model.get_input_embeddings()(ids)[:, 1:].float()
    total, right = embedded.new_zeros(()), []
    for step, logits in enumerate(head(embedded, states, STEPS)):
        counts = answers[:, 1:].clone()
        counts[:, :step] = False
        given, expected = logits[counts], wanted[counts]
        total = total + DECAY**step * F.cross_entropy(given, expected)
        right.append(float((head.ids[given.argmax(-1)] == best[counts]).float().mean()))
    return total, right


def learn(head: Head, model: Any, texts: Sequence[Text], plan: Plan) -> list[float]:
    """Train. Returns the share of right drafts at each step, over the last batches."""
    optimizer = torch.optim.AdamW(head.parameters(), lr=plan.rate, betas=(0.9, 0.95), weight_decay=0.01)
    random = Random(plan.seed)
    schedule = [batch for _ in range(plan.epochs) for batch in batches(texts, plan, random)]
    recent: list[list[float]] = []
    for number, batch in enumerate(schedule):
        share = number / len(schedule)
        for group in optimizer.param_groups:
            group["lr"] = plan.rate * min(1.0, 20 * share + 0.02) * (1.0 - share)
        loss, right = losses(head, model, batch)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        recent = [*recent[-19:], right]
        if number % 20 == 19:
            _show(f"step {number + 1} of {len(schedule)}: loss {loss.item():.3f}, right {_mean(recent)}")
    return _mean(recent)


def _mean(rows: Sequence[Sequence[float]]) -> list[float]:
    return [round(sum(column) / len(rows), 3) for column in zip(*rows, strict=True)]


def acceptance(
    base: str, head: Path, prompts: Sequence[list[int]], temperature: float, longest: int
) -> tuple[float, float]:  # fmt: skip
    """Serve prompts that training has not seen with the head. Returns the mean acceptance length, and the share of
    drafts that are right."""
    config = json.dumps({"method": "eagle3", "model": str(head), "num_speculative_tokens": DEPTH})
    llm = LLM(base, progress=False, device="cpu", max_num_seqs=8, speculative_config=config)
    params = [
        SamplingParams(max_tokens=longest, temperature=temperature, seed=i if temperature else None)
        for i in range(len(prompts))
    ]
    llm.generate(list(prompts), params)
    stats = llm.engine.stats().speculation
    llm.close()
    accepted, drafted = stats.accepted_tokens["model"], stats.draft_tokens["model"]
    return 1 + accepted / max(1, stats.drafts), accepted / max(1, drafted)


def shape_of(config: Any, vocabulary: int) -> HeadShape:
    """Return the sizes of a head for a `transformers` configuration: those of one of its layers."""
    layers, heads = config.num_hidden_layers, config.num_attention_heads
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") != "default" or config.model_type != "llama":
        raise SystemExit(f"heads for {config.model_type} with {rope.get('rope_type')} positions cannot be trained here")
    theta: Any = rope.get("rope_theta") or getattr(config, "rope_theta", 10000.0)
    return HeadShape(
        config.hidden_size, config.intermediate_size, heads, config.num_key_value_heads,
        getattr(config, "head_dim", None) or config.hidden_size // heads, config.vocab_size,
        min(vocabulary, config.vocab_size), config.rms_norm_eps,
        float(theta), config.max_position_embeddings,
        (min(2, layers - 3), layers // 2, layers - 2),
    )  # fmt: skip


CARD = """# EAGLE-3 head for {base}

It drafts for {base}: `weft serve {base} --speculative-config '{{"method": "eagle3", "model": "THIS FOLDER"}}'`. Drafts
change no token.

- Trained by `python -m weft.tools.drafts.train` on {tokens} tokens ({texts} answers) that the model wrote itself, half
  greedily, half at temperature {temperature}. Epochs: {epochs}; {seconds:.0f} s on {device}.
- {parameters:.2f} million parameters, {vocabulary} draft tokens.
- Right drafts at each step, in training: {right}.

Mean acceptance length with {depth} drafts per iteration, on {asked} prompts that training has not seen:

| sampling | acceptance length | right drafts |
|---|---|---|
| greedy | {greedy[0]:.2f} | {greedy[1]:.0%} |
| temperature 0.7 | {warm[0]:.2f} | {warm[1]:.0%} |
"""


def train(base: str, out: Path, plan: Plan, *, measured: int = 100) -> dict[str, Any]:
    """Write a head for the checkpoint `base` to `out`. Returns what the card says."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(plan.seed)
    slots = 64 if plan.device == "cpu" else 512
    llm = LLM(base, progress=False, device=plan.device, max_num_seqs=slots, tuning_seconds=0.0)
    begin = time.monotonic()
    texts = written(llm, base, plan)
    prompts = prompts_of(llm, base, measured, plan, unseen=True)
    llm.close()
    del llm
    path = MODEL_PATH if base == "demo" else Path(base)
    dtype = torch.float32 if plan.device == "cpu" else torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(plan.device).eval()
    shape = shape_of(model.config, plan.vocabulary)
    ids = draft_ids(texts, shape.vocab_size, shape.draft_vocab_size).to(plan.device)
    head = Head(shape, ids, model.get_output_embeddings().weight.float()).to(plan.device)
    right = learn(head, model, texts, plan)
    seconds = time.monotonic() - begin
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(shape.config(), indent=1) + "\n")
    save_file(head.tensors(), out / "model.safetensors")
    card: dict[str, Any] = {
        "base": base if base == "demo" else path.name, "tokens": sum(len(p) + len(a) for p, a in texts),
        "texts": len(texts), "temperature": plan.temperature, "epochs": plan.epochs, "seconds": seconds,
        "device": plan.device, "parameters": sum(p.numel() for p in head.parameters()) / 1e6,
        "vocabulary": shape.draft_vocab_size, "right": right, "depth": DEPTH, "asked": len(prompts),
        "greedy": acceptance(base, out, prompts, 0.0, plan.longest),
        "warm": acceptance(base, out, prompts, 0.7, plan.longest),
    }  # fmt: skip
    (out / "README.md").write_text(CARD.format(**card))
    return card


def _show(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m weft.tools.drafts.train", description=__doc__)
    parser.add_argument("base")
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokens", type=int, default=400_000, help="tokens that the model writes")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--vocabulary", type=int, default=16_384, help="draft tokens at most")
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--longest", type=int, default=256, help="tokens of an answer at most")
    parser.add_argument("--measured", type=int, default=100, help="prompts that acceptance is measured with")
    given = parser.parse_args(arguments)
    plan = Plan(
        given.tokens, given.epochs, given.batch_tokens, given.rate, given.vocabulary, given.temperature, given.seed,
        given.device, given.longest,
    )  # fmt: skip
    card = train(given.base, given.out, plan, measured=given.measured)
    print(f"{given.out}: acceptance length {card['greedy'][0]:.2f} greedy, {card['warm'][0]:.2f} at temperature 0.7")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
