# Settings of all parts; sourced. TINY=1: a trial on a CPU.
set -uo pipefail
PY=${PY:-python3}
DATA=${DATA:-/tmp/data}; D=${D:-/tmp/d}; W=${W:-/tmp/stapes/pretrain}; OUT=${OUT_DIR:-/tmp/out/pretrain}
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 PYTHONUNBUFFERED=1 PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
mkdir -p "$W" "$OUT"
stapes() { $PY -m stapes "$@"; }
say() { echo "$(date +%T) pretrain: $*"; }
workers=${WORKERS:-4}
if [ -n "${TINY:-}" ]; then workers=0; fi
# What every pre-training has in common.
common=(--set data.buckets=5 --set data.workers="$workers" --set pretraining.crop_seconds=8 --set pretraining.least_seconds=1.5
    --set pretraining.feature_penalty=0 --set pretraining.feature_gradient=1 --set pretraining.temperature_decay=0.9997
    --set pretraining.code_width=256 --set pretraining.projection_width=256
    --set model.width=384 --set model.layers=6 --set model.heads=6 --set model.mlp_width=1536 --set model.subsampling_channels=256
    --set model.dropout=0.05 --set model.layer_drop=0 --set optimizer.clip_norm=1 --set optimizer.epsilon=1e-8
    --set run.log_every=25 --set run.evaluate_every=500 --set run.evaluate_limit=192 --set run.tensorboard=false
    --set checkpoint.keep=1 --set checkpoint.keep_best=1)
bring() {  # name, run's folder: its log without texts, and what its model cost
    [ -s "$2/metrics.jsonl" ] || return 0
    mkdir -p "$OUT/runs/$1"; cp "$2/model/training.json" "$OUT/runs/$1/" 2>/dev/null
    $PY -c "import json,sys; [print(json.dumps({k: v for k, v in json.loads(l).items() if k != 'samples'})) for l in sys.stdin if l.strip()]" < "$2/metrics.jsonl" > "$OUT/runs/$1/metrics.jsonl"
}
tiny=()
if [ -n "${TINY:-}" ]; then
    common+=(--set model.width=64 --set model.layers=2 --set model.heads=2 --set model.mlp_width=128 --set model.subsampling_channels=16
        --set pretraining.code_width=64 --set pretraining.projection_width=64 --set data.batch_seconds=12 --set run.evaluate_every=5
        --set run.evaluate_limit=8 --set run.log_every=2 --set run.threads=1)
fi
manifests=()
for each in "$D/ls" "$D/so" "$D/pt"; do [ -s "$each/train.jsonl.gz" ] && manifests+=(--train "$each/train.jsonl.gz"); done
for each in "$D/ls" "$D/so"; do [ -s "$each/dev.jsonl.gz" ] && manifests+=(--dev "$each/dev.jsonl.gz"); done
