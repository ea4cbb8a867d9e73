# Question: Are the machine, its packages and weft ready for the other jobs?
# Hardware: 1 GPU
# Time: 20 s
# Run: python benchmarks/jobs/run.py build/jobs --lane check-machine
# Read: log.txt lists the GPU, its clocks and driver, the versions of torch, Triton and weft, and the report of `weft doctor`.
set -e
nvidia-smi --query-gpu=name,clocks.sm,clocks.max.sm,power.limit,driver_version --format=csv
python -c "import torch, triton, weft; print(torch.__version__, triton.__version__, weft.__version__)"
python -m weft.server doctor
