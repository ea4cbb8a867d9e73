"""Runs a workload against a server in this process."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from sse_server import Stub

from weft.loadgen.client import Target
from weft.loadgen.connection import Address
from weft.loadgen.driver import Driver, Job, Outcomes
from weft.loadgen.lengths import Lengths
from weft.loadgen.prompts import Kind, PromptMaker
from weft.loadgen.workload import ArrivalOptions, ContentOptions, Workload, build


def target(stub: Stub | str, **fields: Any) -> Target:
    url = stub if isinstance(stub, str) else stub.url
    return replace(Target("stub", Address.parse(url), "stub"), **fields)


def content(inputs: int = 16, outputs: int = 8, **fields: Any) -> ContentOptions:
    return ContentOptions(input=Lengths("constant", inputs), output=Lengths("constant", outputs), **fields)


def workload(arrival: ArrivalOptions, options: ContentOptions | None = None, kind: Kind = "ids") -> Workload:
    return build(arrival, options or content(), PromptMaker(kind, 1), None)


async def drive(
    stub: Stub | str, load: Workload, *, context: int | None = None, drain: float | None = None, **fields: Any
) -> Outcomes:
    """`fields`: extra fields of the target."""
    job = Job(load, target(stub, **fields), time.monotonic() + 0.02, drain=drain, context=context)
    return await Driver(job).run()
