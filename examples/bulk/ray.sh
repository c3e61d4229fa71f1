#!/bin/bash
# On a Ray cluster: engines on its GPUs, decoding on the processors of all nodes. The nodes have stapes[ray] and see the
# recordings under the same paths or URLs; only the node that this runs on needs OUT.
#
#   ./ray.sh http://HEAD:8265 s3://bucket/audio /shared/out
set -eu
ADDRESS=$1
INPUTS=$2
OUT=$3
ray job submit --address "$ADDRESS" -- stapes bulk "$INPUTS" "$OUT" --model turbo --ray auto
