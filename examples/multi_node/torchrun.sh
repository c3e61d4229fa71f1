#!/bin/bash
# The same command on each machine; the processes find each other at the first one, and start again after a failure.
#   NODES=2 HEAD=node1 RUN=/shared/runs/large bash torchrun.sh wav2vec2 --config run.toml --strategy fsdp
# NODES=2:4 takes two machines to four: one that is lost is gone on without, one that comes back joins at a restart.
set -eu
: "${NODES:=2}" "${GPUS:=8}" "${HEAD:?name of the first machine}" "${PORT:=29400}" "${RUN:?a folder that all machines see}"
: "${RESTARTS:=10}" "${ID:=stapes}"

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}

exec torchrun --nnodes "$NODES" --nproc-per-node "$GPUS" --max-restarts "$RESTARTS" \
  --rdzv-backend c10d --rdzv-endpoint "$HEAD:$PORT" --rdzv-id "$ID" \
  -m stapes train "$@" -o "$RUN" --resume
