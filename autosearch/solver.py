"""`solver_for`: the constraint solver of both stages, which gives the same answer every time."""

from __future__ import annotations

from ortools.sat.python import cp_model


def solver_for(effort: float, seconds: float) -> cp_model.CpSolver:
    """effort: deterministic seconds. seconds: at most, on the clock."""
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.catch_sigint_signal = False  # it would take Ctrl-C away from whoever listens
    solver.parameters.random_seed = 1
    solver.parameters.max_deterministic_time = effort
    solver.parameters.max_time_in_seconds = seconds
    return solver
