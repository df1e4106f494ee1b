#!/bin/sh
# The comparison with TRL on one GPU, under 8 minutes: bf16, flash attention where TRL's environment has it, tokens a
# second, peak memory, share of the matrix product's rate. A 0.6B shape with random weights, 16 x 8 responses of 256
# forced tokens; both sides train on the same recorded batch.
#
#     GROPIUS_TRL_PYTHON=/path/to/python-with-trl sh benchmarks/gpu.sh [PYTHON]
#
# Needs `make smollm2` (its tokenizer). Without TRL our side alone is not run: there is nothing to compare with.
set -eu
python=${1:-.venv/bin/python}
nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader
"$python" -c 'import torch; assert torch.cuda.is_available(), "this PyTorch sees no GPU"; print("torch", torch.__version__)'
export GROPIUS_BENCH_DEVICE=cuda
timeout 300 "$python" benchmarks/step_vs_trl.py --settings gpu --parts speed --repeats 1 --warmup 2 --steps 3 --no-float32
timeout 170 "$python" benchmarks/step_vs_trl.py --settings gpu --parts shares,scaling --repeats 3 --prompts 4
