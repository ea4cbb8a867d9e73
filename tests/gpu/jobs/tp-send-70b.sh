# seconds 140
# gpus 2
# asks: the same as tp-send of the 70B shape, 1024/256 x 120; behind tp-70b, whose cache it needs (else 60 s longer)
exec python tests/gpu/jobs/send_by_turns.py llama-3-70b 1024:256:120 off on off
