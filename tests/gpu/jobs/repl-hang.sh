# seconds 230
# gpus 1
# asks: why one of two engines on one GPU hung (`--replicas` above 1 is refused there since), and what cures it
#
# Two engines of OPT-1.3B at 256 requests each, as when they hung, in one way after the other (hang_together.py), each
# ended after 9 s without a hang. ways.jsonl has a line a way; what follows depends on what came before. A hang leaves
# WAY-N.state (launched, ended: the model's graph or sampling), .stacks, .gdb (the kernels on the device and where their
# warps stand: griddepcontrol.wait, an mbarrier's try_wait, setmaxnreg). What an answer means:
#
#   base hangs               the fault is there; all other answers count. base goes on: base-8b and three engines for 27 s
#                            follow. All go on: it was of another driver or version; then `resolve` lets replicas be
#                            tried behind a switch, and the rest of this table says nothing.
#   no-pdl goes on           dependent launch it is: engines that share a GPU (`sharers` > 1) take none of it. Its cost
#                            stands beside: iterations_per_s of no-pdl and of base before it hung. no-pdl-long confirms.
#   no-pdl hangs             not (only) that: `neither` and `marked`, which names the launch that does not end.
#   turns goes on            engines that let each other's iterations end do not meet on the device: replicas take turns,
#                            which is what hides their CPU gaps; tokens_per_s beside base's and one engine's decides.
#   matmul hangs             any other program on the GPU can hang an engine: worse than replicas. The cure must be for
#                            all engines, or docs/operations.md says that the GPU must be its own.
#   portable goes on         warp specialisation takes part (registers asked back by setmaxnreg, mbarriers): plain-gemm
#                            and plain-attention say whose. Replicas can have the portable kernels; the figures say at what cost.
#   eager goes on            programmatic edges of captured graphs, not of streams: replicas without graphs.
#   own-weights goes on      the mapping that processes have in common (cuMemMap), which nobody expects.
#   mps goes on              changes of context it is: replicas ask for MPS (`resolve` looks for its pipe), refused else.
#   goes_on_alone            true: starved by time slices, not stuck: no fault, and a longer --hang-timeout would do.
#
# Decided by it: whether `--replicas` works on GPUs, how, and whether Table IV's replicas (repl-paper-*, REPLICAS=4) can run.
# BENCHMARKS.md "Several engines on H200s", docs/replicas.md "On GPUs". First the test of shared weights that never ran.
timeout 60 python -m pytest -q --import-mode=importlib --confcutdir=tests tests/gpu/test_shared_weights.py -p no:cacheprovider
python -c "import torch; print(torch.__version__, torch.version.cuda)"
nvidia-smi --query-gpu=name,driver_version,compute_mode --format=csv,noheader
command -v nvidia-cuda-mps-control cuda-gdb
left=$((SECONDS_LEFT - SECONDS - 30))
python tests/gpu/jobs/hang_together.py "$OUT" --seconds "$((left < 190 ? left : 190))" ${HANG_FLAGS:-}
