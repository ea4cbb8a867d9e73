# seconds 150
# gpus 1
# asks: which kernels are disturbed by those of another process on the same GPU (repl-hang: two engines hung). On 2026-11-23
#   none was, but 24 launches at a time, between which a GPU may have changed hands, and without the counted one, which is
#   the one that hung in engines (BENCHMARKS.md, "Several engines on H200s"). All without a fault: the repair holds here;
#   repl-hang says whether engines do.
#
# share.jsonl: a line a way: launches, those with other bits than alone, errors, what stood still. What an answer means:
#   cublas is wrong          the driver or this machine: nothing of ours can cure it; a GPU must be one process's own.
#   tma wrong                operands by TMA suffice, without roles of warps.
#   ...-early alone wrong    dependent launch it is: engines that share a GPU take none of it, and may have replicas.
#   ...-late wrong as well   our warp-specialised kernels, whatever launches them: replicas get the portable ones.
python tests/gpu/jobs/share.py "$OUT" --processes 4 --run-seconds "${RUN_SECONDS:-4}" ${ONLY:+--only $ONLY}
