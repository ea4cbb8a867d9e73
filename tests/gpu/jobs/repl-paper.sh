# seconds 520
# gpus 1
# asks: Table IV and Figures 2-4 and 8-11 of "Mind the Memory Gap": T(B), L(B), KV use, B_opt under two SLOs, replicas 1-4
#
# MODELS one after the other (all four are 20 minutes, so two calls), the time divided between them. Points are kept in
# $OUT/../repl-paper, or in the folder that PAPER names, of an earlier call: the same models go on from there. At the bound
# of each objective one to four engines run side by side, with 40 % of the time (REPLICAS=0: none, and the sweep has it
# all). Figure 9 (longer prompts and outputs) is of the first model alone: --no-lengths in PAPER_FLAGS, for the two others
# (opt-2.7b llama-2-13b). Table IV of all, on any machine with the four files:
#   weft bench batching --out FOLDER --budget-seconds 0.1
# B_opt is sound where the curve has no dips and the bound lies at its knee; `replicas: 1` with its reason is expected.
# BENCHMARKS.md "How many at once on an H200", in place of the table that has OPT-1.3B alone from points of 0.8 s.
PAPER=${PAPER:-$OUT/../repl-paper}
mkdir -p "$PAPER"
python -m weft.server bench batching --out "$PAPER" --models ${MODELS:-opt-1.3b llama-2-7b} --replicas "${REPLICAS:-4}" \
    --budget-seconds "$((SECONDS_LEFT - 30))" ${PAPER_FLAGS:-}
