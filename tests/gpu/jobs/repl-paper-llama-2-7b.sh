# seconds 330
# gpus 1
# asks: Table IV and Figures 2-4 and 8-11 of "Mind the Memory Gap" for llama-2-7b: T(B), L(B), KV use, B_opt under two SLOs
#
# Points are kept in $OUT/../repl-paper (PAPER names another folder, of an earlier call): the same job goes on from there.
# At the bound of each objective one to four engines run side by side, with 40 % of the time (REPLICAS=0: none, and the sweep
# has it all). Table IV of all models, on any machine with the four files:
#   weft bench batching --out FOLDER --budget-seconds 0.1
# B_opt is sound where the curve has no dips and the bound lies at its knee; `replicas: 1` with its reason is expected.
# BENCHMARKS.md "How many at once on an H200", in place of the table that has OPT-1.3B alone from points of 0.8 s.
PAPER=${PAPER:-$OUT/../repl-paper}
mkdir -p "$PAPER"
python -m weft.server bench batching --out "$PAPER" --models ${MODEL:-llama-2-7b} --no-lengths --replicas "${REPLICAS:-4}" \
    --budget-seconds "$((SECONDS_LEFT - 30 < 300 ? SECONDS_LEFT - 30 : 300))" ${PAPER_FLAGS:-}
