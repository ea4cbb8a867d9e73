# seconds 20
# gpus 1
# asks: whether the machine, its packages and `weft` are as jobs expect
set -e
nvidia-smi --query-gpu=name,clocks.sm,clocks.max.sm,power.limit,driver_version --format=csv
python -c "import torch, triton, weft; print(torch.__version__, triton.__version__, weft.__version__)"
python -m weft.server doctor
