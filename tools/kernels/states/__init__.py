"""Kernels of layers that keep a recurrent state in pages: convolution, gated delta rule, Mamba-2, gated norm.

They are compared with `weft.kernels.reference.states`, also on a GPU by `bench_states`. No GPU executor launches them
yet, so they are not in the wheel. They import only what a folder of `weft.kernels` may, and move there with the
executor.
"""
