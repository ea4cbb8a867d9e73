# Question: Do the results of "Mind the Memory Gap" hold here: best batch size and replicas?
# Hardware: 1 GPU
# Time: 520 s
# Run: python benchmarks/jobs/run.py build/jobs --lane memory-gap-paper
#     Variables: MODELS="opt-1.3b llama-2-7b"; PAPER: the folder of an earlier run to resume; REPLICAS=4; PAPER_FLAGS
# Read: memory-gap-paper/ has Table IV and Figures 2 to 4 and 8 to 11 of the paper. The best batch size is sound if the curve
#     has no dips. All four models take 20 minutes, so run two at a time; `weft bench batching --out FOLDER --budget-seconds
#     0.1` prints the table of all points that were kept.
PAPER=${PAPER:-$OUT/../memory-gap-paper}
mkdir -p "$PAPER"
python -m weft.server bench batching --out "$PAPER" --models ${MODELS:-opt-1.3b llama-2-7b} --replicas "${REPLICAS:-4}" \
    --budget-seconds "$((SECONDS_LEFT - 30))" ${PAPER_FLAGS:-}
