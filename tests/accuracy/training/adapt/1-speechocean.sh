#!/usr/bin/env bash
# Line 1: base on speechocean762, as a whole and by LoRA, with LibriSpeech train as rehearsal.
# Two trainings and the evaluations before them at once. 2240 clips and a third of that in rehearsal, 93 steps an epoch.
# Alone on an H200 about 45 s for both trainings and 60 s for the evaluations; beside six other processes 150–240 s.
source "$(dirname "$0")/common.sh"
STEPS=${STEPS:-280}   # three epochs
common=(--train "$D/so/train.jsonl.gz" --dev "$D/so/dev.jsonl.gz" --dev "$D/ls/dev.jsonl.gz"
    --set model.init="$MODEL" --set data.rehearsal="$D/ls/train.jsonl.gz" --set data.rehearsal_share=0.25
    --set run.epochs=none --set run.steps="$STEPS" --set run.evaluate_every="${EVERY:-70}" --set run.max_minutes="${MAX_MINUTES:-5}"
    --set data.workers=2 --set run.tensorboard=false ${TRAIN_MORE:-})
(evaluate "$MODEL" "$D/ls/test.jsonl.gz" base-ls; evaluate "$MODEL" "$D/so/test.jsonl.gz" base-so) &
(train so-full whisper "${common[@]}" --set optimizer.peak_lr=3e-5 &&
    evaluate "$W/so-full/model" "$D/so/test.jsonl.gz" full-so && evaluate "$W/so-full/model" "$D/ls/test.jsonl.gz" full-ls) &
(train so-lora whisper_lora "${common[@]}" --set checkpoint.keep_best=1 &&
    evaluate "$W/so-lora/model" "$D/so/test.jsonl.gz" lora-so && evaluate "$W/so-lora/model" "$D/ls/test.jsonl.gz" lora-ls) &
wait
mkdir -p "$OUT/models/so-lora" && cp -rf "$W/so-lora/model/." "$OUT/models/so-lora/" 2>/dev/null  # a few MB
home_results
for name in base-so full-so lora-so base-ls full-ls lora-ls; do grep -h WER "$W/results/$name.log" | head -1 | sed "s/^/$name /"; done
echo "DONE adapt 1-speechocean"
