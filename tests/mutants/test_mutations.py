"""The mutations made and skipped, and checks that the table and the list of equivalent mutants name existing ones."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import mutate
import pytest
from mutations import mutants

SOURCE = '''
LIMIT = 3

class Queue:
    """A text is left alone."""

    @property
    def full(self) -> bool:
        return self.size >= LIMIT and not self.closed

    def push(self, item: int = 1) -> None:
        if self.full:
            raise ValueError("full")
        self.items.append(item)
        size = self.size + 1
        self.size = size

    def check(self) -> None:
        assert self.size < 9
'''


def test_every_kind_of_change_is_made_once() -> None:
    changes = {(m.function, m.becomes) for m in mutants(SOURCE, skip=["check"])}
    assert changes == {
        ("Queue.full", "return self.size >= LIMIT or not self.closed"),
        ("Queue.full", "return not self.closed"),
        ("Queue.full", "return self.size >= LIMIT"),
        ("Queue.full", "return self.size > LIMIT and (not self.closed)"),
        ("Queue.full", "return self.size < LIMIT and (not self.closed)"),
        ("Queue.full", "return self.size >= LIMIT and self.closed"),
        ("Queue.push", "if not self.full:"),
        ("Queue.push", "pass"),
        ("Queue.push", "size = self.size - 1"),
        ("Queue.push", "size = self.size + 2"),
        ("Queue.push", "size = self.size + 0"),
    }


def test_a_mutant_is_the_module_with_one_statement_changed() -> None:
    made = list(mutants(SOURCE))
    assert len({m.source for m in made}) == len(made)
    dropped = [m.was for m in made if m.becomes == "pass"]
    assert dropped == ["raise ValueError('full')", "self.items.append(item)", "self.size = size"]
    (one,) = (m for m in made if m.becomes == "if not self.full:")
    module: dict[str, type] = {}
    exec(one.source, module)
    queue = module["Queue"]()
    queue.size, queue.closed = 0, False
    with pytest.raises(ValueError, match="full"):
        queue.push(1)


def test_modules_and_tests_of_the_table_exist() -> None:
    for module, tests in mutate.NEAREST.items():
        assert all((mutate.ROOT / path).is_file() for path in (module, *tests)), module


@pytest.mark.nightly
def test_only_existing_mutants_are_explained() -> None:
    known = mutate.explained()
    there = {task.text for task in mutate.collect(list(mutate.NEAREST))}
    assert not [text for text in known if text not in there]
    assert all(known.values())
