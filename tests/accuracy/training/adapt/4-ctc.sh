#!/usr/bin/env bash
# Line 4: a CTC student from nothing (a Conformer of 256 × 8, 20 ms a frame as the teacher has), with the hybrid teacher
# and without: same size, data, steps, seed. Both at once. STEPS steps of 480 s of audio; some 60 ms a step on a quiet
# H200 (launching kernels, not computing): 1,500 steps are about 110 s, evaluation 25 s more.
source "$(dirname "$0")/common.sh"
STEPS=${STEPS:-1500}; SEEDS=${SEEDS:-0}
for each in ${TEACHER:-} /tmp/stapes/train/runs/base-hybrid-0/model ; do
    [ -f "$each/config.json" ] && TEACHER=$each && break
done
[ -f "${TEACHER:-none}/config.json" ] || { echo "no teacher yet: set TEACHER=…/model"; exit 1; }
say "teacher $TEACHER"
common=(--train "$D/ls/train.jsonl.gz" --train "$D/so/train.jsonl.gz" --dev "$D/ls/dev.jsonl.gz" --dev "$D/so/dev.jsonl.gz"
    --set data.vocabulary="$TEACHER" --set model.subsampling=2 --set model.width=256 --set model.layers=8
    --set data.batch_seconds=480 --set data.workers=4 --set run.epochs=none --set run.steps="$STEPS"
    --set run.evaluate_every="${EVERY:-500}" --set optimizer.peak_lr=1e-3 --set optimizer.warmup_steps=300
    --set optimizer.ema=0.99 --set checkpoint.keep=1 --set checkpoint.keep_best=1 --set run.tensorboard=false ${TRAIN_MORE:-})
for seed in $SEEDS; do
    for kind in taught alone; do
        if [ $kind = taught ]; then recipe=distill_ctc; more=(--set distill.teacher="$TEACHER"); else recipe=ctc; more=(); fi
        (train "ctc-$kind-$seed" $recipe "${common[@]}" --set seed="$seed" ${more[@]+"${more[@]}"} &&
            evaluate "$W/ctc-$kind-$seed/model" "$D/ls/test.jsonl.gz" "$kind-$seed-ls" &&
            evaluate "$W/ctc-$kind-$seed/model" "$D/so/test.jsonl.gz" "$kind-$seed-so") &
    done
    wait
done
home_results
for name in $(cd "$W/results" && ls -d taught-*-[ls][so] alone-*-[ls][so] 2>/dev/null); do grep -h WER "$W/results/$name.log" | head -1 | sed "s/^/$name /"; done
echo "DONE adapt 4-ctc"
