# seconds 150
# gpus 1
# asks: which kernels are disturbed by those of another process on the same GPU (repl-hang: two engines hung; cases of
#   test_pod that ran beside each other had wrong bits, illegal addresses and illegal instructions, on 2026-11-23)
#
# share.jsonl: a line a way: launches, those with other bits than alone, errors, what stood still. What an answer means:
#   cublas is wrong          the driver or this machine: nothing of ours can cure it; a GPU must be one process's own.
#   tma wrong                operands by TMA suffice, without roles of warps.
#   ...-early alone wrong    dependent launch it is: engines that share a GPU take none of it, and may have replicas.
#   ...-late wrong as well   our warp-specialised kernels, whatever launches them: replicas get the portable ones.
python tests/gpu/jobs/share.py "$OUT" --processes 4 --run-seconds "${RUN_SECONDS:-4}" ${ONLY:+--only $ONLY}
