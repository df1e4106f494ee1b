#!/bin/sh
# One GPU, under 10 minutes. A 0.6B shape with random weights, 16 x 8 responses of 256 forced tokens.
#
#     [GROPIUS_TRL_PYTHON=/path/to/python-with-trl] [GROPIUS_VLLM_PYTHON=/path/to/python-with-vllm] sh benchmarks/gpu.sh [PYTHON]
#
# With TRL's environment: the comparison of a step, bf16, flash attention where that environment has it, tokens a second,
# peak memory, share of the matrix product's rate; both sides train on the same recorded batch. With vLLM's, or vLLM beside
# this package: colocated vLLM with sleep and wake beside the own engine, seconds of a step, memory awake and asleep,
# share of peak. Needs `make smollm2` (its tokenizer).
set -eu
python=${1:-.venv/bin/python}
nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader
"$python" -c 'import torch; assert torch.cuda.is_available(), "this PyTorch sees no GPU"; print("torch", torch.__version__)'
export GROPIUS_BENCH_DEVICE=cuda
if [ -n "${GROPIUS_TRL_PYTHON:-}" ]; then
    timeout 280 "$python" benchmarks/step_vs_trl.py --settings gpu --parts speed --repeats 1 --warmup 2 --steps 3 --no-float32
    timeout 120 "$python" benchmarks/step_vs_trl.py --settings gpu --parts shares,scaling --repeats 3 --prompts 4
else
    echo "no comparison with TRL: name its environment, GROPIUS_TRL_PYTHON"
fi
if [ -n "${GROPIUS_VLLM_PYTHON:-}" ] || "$python" -c 'import vllm' 2>/dev/null; then
    timeout 180 "$python" benchmarks/colocated.py --model random:0.6b
else
    echo "no colocated vLLM: name its environment, GROPIUS_VLLM_PYTHON, or install it here"
fi
