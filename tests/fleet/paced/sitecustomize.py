"""Placed on a daemon's path: its engines compute nothing and their iterations last as long as the profile in
WEFT_TEST_PACE says. Everything else is real: processes, sockets, HTTP, router, scheduler, pages. So a busy machine
changes little."""

import importlib.machinery
import os
import sys
import time

TARGET = "weft.engine.runner.cpu.cpu_runner"


class _Paced:
    """Finds that one module and changes it after it is loaded."""

    def find_spec(self, name, path=None, _target=None):
        if name != TARGET:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            pace(module)

        spec.loader.exec_module = exec_module
        return spec


def pace(module):
    import numpy as np

    from weft.deploy.fleet.profile import Features, load_profile
    from weft.engine.runner.iteration.batch import StepResult

    profile = load_profile(os.environ["WEFT_TEST_PACE"])

    def run(self, batch):
        begin = time.perf_counter()
        idle = begin - self._last_end if self._last_end else 0.0
        time.sleep(profile.seconds(Features.of(batch)))
        self._last_end = time.perf_counter()
        tokens = np.full(len(batch.sampled_rows), 300, np.int32)
        return StepResult(batch, tokens, None, (), self._last_end - begin, idle)

    module.CpuRunner.run = run


if os.environ.get("WEFT_TEST_PACE"):
    sys.meta_path.insert(0, _Paced())
