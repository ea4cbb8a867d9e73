"""`weft advise`: how many requests should run at once, measured on the engine, solved, reported.

Curves of measured points (`curve.py`, `sweep.py`, `engine_bench.py`), what follows from them (`solve.py`, `rate.py`,
`replicas.py`), and reports. The papers' equations are those of "Mind the Memory Gap" (arXiv 2503.08311).
"""
