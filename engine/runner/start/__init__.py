"""From a configuration to a runner that is ready.

Owns: loading, GEMM tuning, kernel compilation, the self-test, `weft compile`, `weft inspect`.
May import: every other folder of `runner/`.
Never: runs once the engine serves.
"""
