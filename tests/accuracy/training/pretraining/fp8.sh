#!/usr/bin/env bash
# 200 steps of wav2vec 2.0 base's pre-training, from the same weights, on the same batches, bf16 and fp8, one after the
# other so that speeds can be compared: run it with nothing else on the GPU. compile: each layer compiled, both.
# 107 crops of 4 s: with 1,069 of them every batch has one shape, so that layers are compiled once.
# About 30 s (bf16) + 90 s (fp8, compiled) + 60 s (bf16, compiled). RUNS="bf16 fp8_compiled" leaves out the third.
. "$(dirname "$0")/common.sh"
size=(--set data.batch_seconds="${BATCH:-428}" --set data.workers="${WORKERS:-6}" --set data.buckets=1 --set pretraining.crop_seconds=4 --set pretraining.least_seconds=4)
steps=${STEPS:-200}
[ -n "${TINY:-}" ] && size=(--set data.batch_seconds=8 --set data.workers=0 --set data.buckets=1 --set pretraining.crop_seconds=2 --set pretraining.least_seconds=2 --set model.width=64 --set model.layers=1 --set model.heads=2 --set model.mlp_width=64 --set model.subsampling_channels=16)
for name in ${RUNS:-bf16 fp8_compiled bf16_compiled}; do
    how=()
    case $name in fp8*) how+=(--set run.fp8=true);; esac
    case $name in *compiled) how+=(--set run.compile=true);; esac
    [ -s "$W/fp8/$name.done" ] && { say "$name: there already"; continue; }
    rm -rf "$W/fp8/$name"; mkdir -p "$W/fp8"
    say "$name"
    timeout "${MAX_SECONDS:-240}" $PY -m stapes train pretrain --train "$D/ls/train.jsonl.gz" -o "$W/fp8/$name" "${size[@]}" \
        --set model.dropout=0 --set model.layer_drop=0 --set optimizer.peak_lr=5e-4 --set optimizer.warmup_steps=40 --set optimizer.epsilon=1e-8 \
        --set optimizer.clip_norm=1 --set pretraining.feature_penalty=0 --set pretraining.feature_gradient=1 --set run.steps="$steps" --set run.log_every=5 \
        --set run.tensorboard=false --set checkpoint.keep=1 ${FP8_EXTRA:-} "${how[@]}" > "$W/fp8/$name.log" 2>&1 && echo ok > "$W/fp8/$name.done" || { say "$name: exit code $?"; tail -n 3 "$W/fp8/$name.log"; }
done
$PY "$HERE/fp8_compare.py" "$W/fp8" "$OUT/fp8.json"
for folder in "$W"/fp8/*/; do bring "precision-$(basename "$folder")" "$folder"; done
say "DONE pretrain fp8"
