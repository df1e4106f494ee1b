#!/usr/bin/env bash
# One node, every GPU a trainer rank, under torchrun itself. On one machine `gropius train RECIPE --set
# cluster.trainer_ranks=N` does the same without it; use torchrun where your site already wraps it.
set -euo pipefail

RECIPE=${RECIPE:-recipes/arithmetic.toml}
RANKS=${RANKS:-2}

torchrun --standalone --nnodes=1 --nproc-per-node="$RANKS" --max-restarts=3 \
  -m gropius train "$RECIPE" --name cluster --set cluster.trainer_ranks="$RANKS"
