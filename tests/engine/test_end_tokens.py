"""End tokens come from every file that names them, and from no value that means "none"."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny import save_tiny

from weft.engine.config import EngineConfig
from weft.engine.demo import MODEL_PATH
from weft.engine.llm import LLM
from weft.engine.model.directory import ends_of, eos_ids
from weft.engine.model.gguf.tokenizer import end_tokens
from weft.engine.model.implementation import choose_spec
from weft.server.config import ServeConfig

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HARMONY = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{% if loop.last and not add_generation_prompt %}<|return|>{% else %}<|end|>{% endif %}"
    "{# a call ends with <|call|> #}{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}"
    "{% endfor %}"
)
LLAMA = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content }}"
    "{% if m.builtin %}<|eom_id|>{% else %}<|eot_id|>{% endif %}{% endfor %}"
)
COHERE = (
    "{% for m in messages %}<|TURN|>{% if m.role == 'assistant' %}<|SAYS|>{{ m.content }}<|SAID|>{% else %}"
    "{{ m.content }}{% endif %}<|TURN_OVER|>{% endfor %}"
)
CHANNELS = "{% for m in messages %}<|message|>{{ m.content }}<|end|>{% endfor %}"
WITH_TOOLS = (
    "{% if tools is not none %}{{ raise_exception('tools') }}{% endif %}"
    "{% for m in messages %}{{ m.content }}[turn_done]{% if loop.last %}<end>{% endif %}{% endfor %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
GENERATION = (
    "{% for m in messages %}<|im_start|>{% generation %}{{ m.content }}[turn_done]{% endgeneration %}{% endfor %}"
)
PARTS = (
    "{% for m in messages %}{{ m.role }}:{% for part in m.content %}{{ part.text }}{% endfor %}[turn_done]{% endfor %}"
)


def _directory(
    path: Path, *, special: tuple[str, ...] = (), plain: tuple[str, ...] = (), vocabulary: tuple[str, ...] = (),
    generation: Any = None, template: str | None = None, **tokenizer: Any,
) -> Path:  # fmt: skip
    """Ids: those of `vocabulary` from 0, then 10, 11, … for `special`, 20, 21, … for `plain` added tokens."""
    added = [{"id": i, "content": t, "special": True} for i, t in enumerate(special, 10)]
    added += [{"id": i, "content": t, "special": False} for i, t in enumerate(plain, 20)]
    model = {"type": "BPE", "vocab": {token: i for i, token in enumerate(vocabulary)}}
    (path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": added, "model": model}))
    (path / "tokenizer_config.json").write_text(json.dumps({**tokenizer, "chat_template": template}))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return path


@pytest.mark.parametrize(
    ("generation", "config", "ends"),
    [
        (None, {"eos_token_id": 2}, (2,)),
        ({"eos_token_id": [7, 8]}, {"eos_token_id": 2}, (7, 8)),
        ({}, {"eos_token_id": 2}, (2,)),
        ({"eos_token_id": None}, {"eos_token_id": 2}, (2,)),
        ({"eos_token_id": []}, {"eos_token_id": 2}, (2,)),
        ({"eos_token_id": [None]}, {"eos_token_id": 2}, (2,)),
        ({"eos_token_id": [7, None]}, {"eos_token_id": 2}, (7,)),
        ({"eos_token_id": -1}, {"eos_token_id": 2}, (2,)),
        ({"eos_token_id": False}, {"eos_token_id": [2, 2]}, (2,)),
        ({"eos_token_id": "2"}, {}, (2,)),
        ({"eos_token_id": "</s>"}, {}, (10,)),
        ({"eos_token_id": ["word", "</s>"]}, {}, (1, 10)),
        ({"eos_token_id": "no such token"}, {"eos_token_id": 2.0}, (2,)),
        ({"eos_token_id": {"content": "</s>", "special": True}}, {"eos_token_id": 2}, (10,)),
        ({"eos_token_id": [{"content": "</s>"}, 3]}, {}, (3, 10)),
        ({"eos_token_id": [{}, [4], 2.5]}, {"eos_token_id": 2}, (2,)),
        ({"eos_token_id": float("inf")}, {"eos_token_id": 2}, (2,)),
        ({"eos_token_id": float("nan")}, {"eos_token_id": 2}, (2,)),
        (None, {"eos_token_id": None, "text_config": {"eos_token_id": [5, 6]}}, (5, 6)),
        (None, {"eos_token_id": 4, "text_config": {"eos_token_id": 5}}, (4,)),
        (None, {"llm_config": {"eos_token_id": 5}}, (5,)),
        (None, {"eos_token_id": None, "text_config": None}, ()),
        (None, {}, ()),
    ],
)
def test_a_value_that_names_no_token_gives_way_to_the_next_file(
    generation: Any, config: dict[str, Any], ends: tuple[int, ...], tmp_path: Path
) -> None:
    _directory(tmp_path, special=("</s>",), vocabulary=("a", "word"), generation=generation)
    assert eos_ids(tmp_path, config) == ends


def test_a_directory_without_a_tokenizer_has_those_of_its_configuration(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": null}')
    assert eos_ids(tmp_path, {"eos_token_id": 2}) == (2,)


@pytest.mark.parametrize(
    "token", ["<|im_end|>", {"content": "<|im_end|>", "lstrip": False, "__type": "AddedToken"}], ids=["text", "object"]
)
def test_the_tokenizers_end_token_is_added(token: Any, tmp_path: Path) -> None:
    _directory(tmp_path, special=("<|endoftext|>", "<|im_start|>", "<|im_end|>"), eos_token=token)
    assert eos_ids(tmp_path, {"eos_token_id": 10}) == (10, 12)


def test_the_tokenizers_end_token_may_be_an_ordinary_one_or_stand_in_an_older_file(tmp_path: Path) -> None:
    _directory(tmp_path, vocabulary=("a", "<eos>"), eos_token="<eos>")
    assert eos_ids(tmp_path, {}) == (1,)
    _directory(tmp_path, special=("</s>",))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": {"content": "</s>"}}')
    assert eos_ids(tmp_path, {}) == (10,)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer_config.json").write_text('{"added_tokens_decoder": {"7": {"content": "</s>"}}}')
    assert eos_ids(tmp_path, {}) == (7,)
    _directory(tmp_path, special=("</s>",), eos_token=None)
    assert eos_ids(tmp_path, {}) == (), "null is absent here as well"


def test_one_of_several_templates_names_the_end(tmp_path: Path) -> None:
    last = {"template": CHATML.replace("<|im_end|>", "<|eot|>"), "name": "tool_use"}
    for given, end in (
        ([last, {"name": "default", "template": CHATML}], 11),
        ([last], 12),  # the only one that there is
        ({"default": CHATML}, 11),
    ):
        _directory(tmp_path, special=("<|im_start|>", "<|im_end|>", "<|eot|>"))
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": given}))
        assert eos_ids(tmp_path, {}) == (end,)


def test_damaged_tokenizer_files_hide_no_end_tokens(tmp_path: Path) -> None:
    decoder: Any = {"x": {"content": "<e>"}, "7": "<e>", "8": {"content": "<f>"}}
    _directory(tmp_path, special=("</s>",), eos_token="<f>", added_tokens_decoder=decoder)
    assert eos_ids(tmp_path, {"eos_token_id": 2}) == (2, 8)
    for text in ('{"model": null}', '{"added_tokens": [{"content": "</s>"}, {"id": null, "content": "<f>"}]}', "{"):
        (tmp_path / "tokenizer.json").write_text(text)
        assert eos_ids(tmp_path, {"eos_token_id": 2}) == (2, 8)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<e>"}')
    (tmp_path / "added_tokens.json").write_text('{"<e>": 9, "<f>": null}')
    assert eos_ids(tmp_path, {"eos_token_id": 2}) == (2, 9), "the file of older tokenizers"


@pytest.mark.parametrize(
    ("template", "special", "plain", "ends"),
    [
        (CHATML, ("<|im_start|>", "<|im_end|>"), (), (11,)),
        (CHATML, ("<|im_start|>",), ("<|im_end|>",), (20,)),
        (CHATML, ("<|im_start|>",), (), ()),
        (HARMONY, ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>"), (), (14, 15)),
        (
            "{% for m in messages %}<|message|>{{ m.content }}<|end|>{% endfor %}",
            ("<|message|>", "<|channel|>", "<|end|>"),
            (),
            (),
        ),
        (LLAMA, ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"), (), (12, 13)),
        (COHERE, ("<|TURN|>", "<|SAYS|>", "<|SAID|>", "<|TURN_OVER|>"), (), (13,)),
        (MISTRAL, ("<s>", "</s>", "[INST]", "[/INST]"), (), (11,)),
        (GENERATION, ("<|im_start|>", "[turn_done]"), (), (11,)),
        (PARTS, ("<|im_start|>", "[turn_done]"), (), (11,)),
        (WITH_TOOLS, ("<end>", "[turn_done]"), (), (11,)),
        ("{% for m in messages %}<|user|>{{ m.content }}{% endfor %}<|assistant|> ok", ("<|assistant|>",), (), ()),
        ("{{ raise_exception('no') }} <|im_end|>", ("<|im_end|>",), (), (10,)),
        ("{% broken", ("<|im_end|>",), (), ()),
        (CHATML + "{{ eos_token }}", ("<|im_start|>", "<|im_end|>", "</s>"), (), (11, 12)),
        ("{% for m in messages %}<answer>{{ m.content }}</answer>{% endfor %}", (), ("</answer>",), ()),
    ],
)
def test_what_ends_an_answer_in_the_chat_template_ends_it(
    template: str, special: tuple[str, ...], plain: tuple[str, ...], ends: tuple[int, ...], tmp_path: Path
) -> None:
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    _directory(tmp_path, special=special, plain=plain, template=template, **names)
    assert tuple(sorted(eos_ids(tmp_path, {}))) == ends
    _directory(tmp_path, special=special, plain=plain, template=None, **names)
    (tmp_path / "chat_template.jinja").write_text(template)
    assert tuple(sorted(eos_ids(tmp_path, {}))) == ends
    (tmp_path / "chat_template.jinja").unlink()
    several: Any = [{"name": "tool_use", "template": "other"}, {"name": "default", "template": template}]
    _directory(tmp_path, special=special, plain=plain, template=several, **names)
    assert tuple(sorted(eos_ids(tmp_path, {}))) == ends


def test_a_part_of_a_harmony_answer_ends_it_only_if_a_file_says_so(tmp_path: Path) -> None:
    special = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>")
    _directory(tmp_path, special=special, template=HARMONY, generation={"eos_token_id": [14, 11]})
    assert sorted(eos_ids(tmp_path, {})) == [11, 14, 15]


def test_ids_outside_the_vocabulary_are_left_out_and_reported(tmp_path: Path) -> None:
    _directory(
        tmp_path, special=("<|im_start|>", "<|im_end|>"), template=CHATML, generation={"eos_token_id": [11, 99]},
        eos_token="<|im_end|>",
    )  # fmt: skip
    assert eos_ids(tmp_path, {}, 50) == (11,)
    assert str(ends_of(tmp_path, {}, 50)) == (
        "end tokens: 11 <|im_end|> (generation_config.json, tokenizer_config.json, chat template); "
        "ignored, outside the vocabulary: 99 (generation_config.json)"
    )
    _directory(tmp_path, generation={"eos_token_id": [98, 99]})
    assert eos_ids(tmp_path, {"eos_token_id": 2}, 50) == (2,), "as if the file named none"
    assert str(ends_of(tmp_path, {}, 5)).startswith("no end tokens: answers end at max_tokens or a stop string; ignor")


CONTROL, NORMAL, USER = 3, 1, 4


@pytest.mark.parametrize(
    ("tokens", "types", "named", "ends"),
    [
        (("a", "</s>", "<|im_end|>"), (NORMAL, CONTROL, CONTROL), {}, [1, 2]),
        (("a", "</s>", "<|im_end|>"), (NORMAL, NORMAL, NORMAL), {}, [2]),
        (("a", "</s>", "<end_of_turn>"), (NORMAL, USER, USER), {"eos": 0}, [0, 2]),
        (("a", "b", "c"), (NORMAL,) * 3, {"eos": 1, "eot": 2, "eom": 99}, [1, 2]),
        (("a", "b"), (NORMAL,) * 2, {"eos": 4294967295, "eot": -1}, []),
        (("<|end|>", "<|return|>", "<|call|>"), (CONTROL,) * 3, {"eos": 1}, [1, 2]),
        (("<|end|>", "<|calls|>", "<|flush|>"), (CONTROL,) * 3, {"eos": 2}, [2, 1]),
        (("<|end|>", "<|endoftext|>"), (CONTROL,) * 2, {"eos": 1}, [1, 0]),
    ],
)
def test_a_gguf_file_names_ends_in_its_metadata_and_its_vocabulary(
    tokens: tuple[str, ...], types: tuple[int, ...], named: dict[str, int], ends: list[int]
) -> None:
    metadata: dict[str, Any] = {f"{name}_token_id": token for name, token in named.items()}
    metadata |= {"model": "gpt2", "tokens": list(tokens), "token_type": list(types)}
    file: Any = SimpleNamespace(
        get=lambda key, default=None: metadata.get(key.removeprefix("tokenizer.ggml."), default)
    )
    assert end_tokens(file) == ends


def test_the_default_of_an_architecture_counts_if_no_file_names_an_end(tmp_path: Path) -> None:
    save_tiny("yi", tmp_path)
    (tmp_path / "generation_config.json").unlink()
    for value, ends in (({}, (2,)), ({"eos_token_id": None}, ()), ({"eos_token_id": 7}, (7,))):
        config = json.loads((tmp_path / "config.json").read_text())
        config.pop("eos_token_id", None)
        (tmp_path / "config.json").write_text(json.dumps({**config, **value}))
        spec, _ = choose_spec(EngineConfig(model=str(tmp_path), model_impl="transformers"))
        assert spec.eos_token_ids == ends


def test_a_chat_template_that_replaces_the_models_ends_answers_its_own_way(tmp_path: Path) -> None:
    """The demo model has `<|pad|>`, which no file calls an end."""
    template = "{% for m in messages %}{{ m.content }}<|pad|>{% endfor %}"
    (tmp_path / "template").write_text(template)
    pad = json.loads((MODEL_PATH / "config.json").read_text())["pad_token_id"]
    for given in (template, str(tmp_path / "template")):
        engine = ServeConfig(model="demo", chat_template=given).engine
        llm = LLM("demo", chat_template=engine.chat_template, num_pages=8, progress=False)
        try:
            assert pad in llm.engine.spec.eos_token_ids
            assert llm.tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False) == "a<|pad|>"
        finally:
            llm.engine.close()
