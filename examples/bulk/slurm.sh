#!/bin/bash
# A Slurm array over shards: 16 tasks, each with one GPU, share the folder OUT. A task that is preempted is queued again
# and goes on; `sbatch slurm.sh` once more does what is left.
#
#   sbatch slurm.sh /data/manifest.jsonl /scratch/out
#   stapes bulk status /scratch/out
#
# The file system of OUT has to know locks (flock): NFS 4, Lustre with -o flock, GPFS and BeeGFS (tuned so) do.
#SBATCH --job-name=stapes-bulk
#SBATCH --array=0-15
#SBATCH --gres=gpu:1
#SBATCH --cpus-per-task=16
#SBATCH --mem=64G
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --output=stapes-bulk-%A-%a.log
set -u
INPUTS=$1
OUT=$2
srun stapes bulk "$INPUTS" "$OUT" --model turbo --offline \
  --shard-index "$SLURM_ARRAY_TASK_ID" --shard-count "$SLURM_ARRAY_TASK_COUNT"
