"""`Prefills`: chooses the chunks of an iteration: a share for the shortest prompts, the rest in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from weft.engine.scheduling.build import Chunk
from weft.engine.scheduling.chunk_keeper import Cut
from weft.engine.scheduling.fairness import Fairness
from weft.engine.scheduling.images import Images
from weft.engine.scheduling.request import Request
from weft.engine.scheduling.slots import SlotTable
from weft.engine.scheduling.waiting import WaitingQueue


class _Ranked(NamedTuple):
    """A prompt in progress, as the share for the shortest prompts ranks it."""

    precedence: int
    level: int  # how many better priorities its tenant has in progress
    left: int  # tokens
    order: int
    slot: int


def _levels(going: list[Request]) -> Iterator[tuple[int, Request]]:
    """Yield each request with the number of better priorities that its tenant has among them."""
    priorities: dict[tuple[int, int], set[int]] = {}
    for r in going:
        priorities.setdefault((r.precedence, r.tenant), set()).add(r.priority)
    for r in going:
        yield sum(priority < r.priority for priority in priorities[r.precedence, r.tenant]), r


def _shorter(ranked: _Ranked, going: Request, waiting: Request) -> bool:
    """Return whether a prompt in progress has the share before the shortest waiting one."""
    if going.precedence != waiting.precedence:
        return going.precedence < waiting.precedence
    if going.tenant != waiting.tenant:
        return not ranked.level and ranked.left <= len(waiting.token_ids)
    return (going.priority, ranked.left) <= (waiting.priority, len(waiting.token_ids))


class Prefills:
    def __init__(
        self, slots: SlotTable, waiting: WaitingQueue, fairness: Fairness, admit: Callable[[Request], int | None],
        chunk_step: int, *, loose: bool = False, images: Images | None = None,
    ) -> None:  # fmt: skip
        """`admit` gives a waiting request a slot, or returns None. Prompts are cut at multiples of `chunk_step`; if
        `loose`, also elsewhere in iterations with fewer tokens than that for prompts. images: limits chunks too."""
        self._slots, self._waiting, self._fairness = slots, waiting, fairness
        self._admit, self._chunk_step = admit, chunk_step
        self._chunks: dict[int, int] = {}  # tokens by slot of the iteration being formed
        self._loose, self._images = loose, images
        self._steps: tuple[int, ...] = (chunk_step,)  # where the iteration being formed may cut prompts, coarsest first
        self._cut: Cut | None = None  # a further limit besides the budget
        self._budget = 0  # of the iteration being formed
        self._least_left = max(chunk_step, 0 if images is None else images.undivided)
        """Tokens that the shortest prompts leave to the others, so that these continue."""

    def in_turn(self) -> list[Request]:
        """Return the prompts in progress, in order. Prompts that started early are left out until their turn."""
        s, head = self._slots, self._waiting.head()
        going = [s.of(slot) for slot in s.in_order(s.prefilling()).tolist()]
        return [r for r in going if not r.early] or [r for r in going if head is None or r.goes_before(head)]

    def schedule(self, budget: int, cut: Cut | None = None) -> list[Chunk]:
        """Return (slot, tokens) chunks until `budget` is used up or `cut` allows no more. A share goes to the shortest
        prompts, then come running prefills, then new requests. Prompts that started early continue at their turn among
        the new requests."""
        s, queue = self._slots, self._waiting
        self._chunks, self._cut, self._budget = {}, cut, budget
        finer = self._loose and budget < self._chunk_step
        self._steps = (self._chunk_step, s.page_size, 1) if finer else (self._chunk_step,)
        going: list[int] = s.prefilling().tolist()
        if len(queue) or len(going) > 1:
            if cut is not None:
                cut.early = True
            budget -= self._shortest_first(going, self._fairness.share(budget, self._least_left))
            if cut is not None:
                cut.early = False
        early: list[Request] = []
        for request in map(s.of, s.in_order(np.array(going, np.intp)).tolist()):
            if request.early:
                early.append(request)
            else:
                budget -= self._take(request.slot, budget)
        stuck = False
        while budget > 0 and (cut is None or not cut.bound):
            head = queue.head() if s.num_open and not stuck else None
            if early and (head is None or early[0].goes_before(head)):
                budget -= self._take(early.pop(0).slot, budget)
                continue
            if head is None:
                break
            admitted = self._admit_head(head) or self._overtake(head)
            if admitted is None:
                stuck = True
            elif admitted.loading is None:
                length = self._take(admitted.slot, budget)
                budget = budget - length if length else 0
        queue.blocked = "slots" if not s.num_open else "pages" if stuck else "tokens"
        return list(self._chunks.items())

    def _shortest_first(self, going: list[int], share: int) -> int:
        """Give at most `share` tokens to the shortest prompts, and return how many: those of the first precedence, and
        of the highest priority within each tenant. Adds newly admitted slots to `going`."""
        s, left = self._slots, share
        if share <= 0:
            return 0
        ranked = iter(sorted(map(self._ranked, _levels([s.of(slot) for slot in going]))))
        running, joining = next(ranked, None), True
        while left > 0:
            request = self._waiting.shortest() if joining and s.num_open else None
            if running is not None and (request is None or _shorter(running, s.of(running.slot), request)):
                slot, running = running.slot, next(ranked, None)
            elif request is None:
                break
            elif len(request.token_ids) > left < self._chunk_step or not self._admit_early(request):
                joining = False
                continue
            elif request.loading is not None:
                continue
            else:
                slot = request.slot
                going.append(slot)
            if not (length := self._take(slot, left)):
                break
            left -= length
        return share - left

    def _ranked(self, leveled: tuple[int, Request]) -> _Ranked:
        (level, request), s = leveled, self._slots
        left = int(s.target[request.slot]) - int(s.scheduled[request.slot])
        return _Ranked(request.precedence, level, left, request.order, request.slot)

    def _admit_early(self, request: Request) -> bool:
        head, blocked = self._waiting.head(), self._waiting.blocked
        assert head is not None
        if request is head:
            return self._admit_head(request) is not None
        if not self._fairness.may_overtake(head, blocked) or self._admit(request) is None:
            return False
        self._fairness.overtakes(head, blocked)
        request.early = True
        return True

    def _admit_head(self, head: Request) -> Request | None:
        """Admit the first in line. Returns None if it must wait."""
        if self._admit(head) is None:
            return None
        self._fairness.admitted()
        head.early = False
        return head

    def _overtake(self, head: Request) -> Request | None:
        """Admit a request that fits the free pages, while the head does not."""
        for request in self._waiting.overtaking(head):
            if request is head or not self._fairness.may_overtake(head, "pages") or self._admit(request) is None:
                continue
            self._fairness.overtakes(head, "pages")
            request.early = True
            return request
        return None

    def _take(self, slot: int, budget: int) -> int:
        """Extend the slot's chunk to its prefill's end, or to where it may be cut. Returns the tokens added."""
        taken, cut = self._chunks.get(slot, 0), self._cut
        done, target = int(self._slots.scheduled[slot]) + taken, int(self._slots.target[slot])
        length = target - done
        allowed = budget if cut is None else cut.most(done, min(length, budget))
        if self._images is not None:
            # The first chunk of an iteration may hold a larger image than the budget.
            room = self._budget - sum(self._chunks.values()) if self._chunks else None
            allowed = self._images.most(slot, done, min(length, allowed), room, first=not taken)
        if length > allowed:
            cuts = ((done + allowed) // step * step - done for step in self._steps)
            length = next((length for length in cuts if length > 0), 0)
        if length:
            self._chunks[slot] = taken + length
            if cut is not None:
                cut.took(done, length)
        return length
