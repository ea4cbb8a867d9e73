"""Code that only a checkout needs: benchmarks, the demo model's training, papers reproduced, installation.

The wheel leaves this package out. Nothing in the product imports it; `weft bench` and `weft demo` look its commands up
by name in `weft.tools.commands`.
"""
