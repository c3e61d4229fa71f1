#!/usr/bin/env bash
# Line 4: a CTC student on tiny.en's encoder (INIT; 384 × 4, 20 ms a frame as base has), with the hybrid teacher and
# without: same data, batches, steps, seed, augmentation, and the same first weights. Parts, to look between them:
#   check    the GPU's CTC kernel against PyTorch's, 10 s
#   teacher  hybrids on base's encoder (TEACHERS; …-spoken: with synthetic speech too, 24 h of texts beside 4 h) at once,
#            TEACHER_STEPS steps of 240 s, about 13 a second for one alone: 250 s; nothing where TEACHER is one
#   audio    what the teacher's CTC head writes for speech in other languages, for `more` alone: 30–60 s
#   train    VARIANTS at once, STEPS steps of 160 s of audio, 12 to 18 a second: 180–240 s. `strict` follows the teacher
#            more than the texts; `more` learns from it on the other speech too
#   test     the student without, and of the others the better on dev: 40 s
source "$(dirname "$0")/common.sh"
PARTS=${PARTS:-"check teacher train test"}
STEPS=${STEPS:-2500}; SEEDS=${SEEDS:-0}; VARIANTS=${VARIANTS:-"alone taught strict"}; INIT=${INIT:-tiny.en}
TEACHERS=${TEACHERS:-"gentle-spoken"}; TEACHER_STEPS=${TEACHER_STEPS:-2800}
SPOKEN=${SPOKEN:-0}  # 1: all students hear the synthetic speech too, with its texts
C=$W/ctc; mkdir -p "$C"
help=$HERE/ctc_teacher.py
dev=(--dev "$D/ls/dev.jsonl.gz" --dev "$D/so/dev.jsonl.gz" --set run.epochs=none --set run.tensorboard=false
    --set optimizer.ema=0.99 --set checkpoint.keep=1 --set checkpoint.keep_best=1)
# The teacher's encoder has positions for 30 s, which slower speech must not pass; both students do without the same few.
[ -s "$C/train.jsonl.gz" ] || $PY "$help" short "$C/train.jsonl.gz" 25 "$D/ls/train.jsonl.gz" "$D/so/train.jsonl.gz"
find_teacher() {
    for each in ${TEACHER:-} "$C/teacher" ${TEACHER_ELSE:-}; do
        [ -f "$each/config.json" ] && { TEACHER=$(readlink -f "$each"); return 0; }
    done
    return 1
}
prepare_foreign() {  # many voices, in other languages; English of the data folder that has no other use is little
    [ -f "$C/foreign/train.jsonl.gz" ] && return
    $PY "$help" foreign "$DATA" "$C/foreign.jsonl"
    [ -s "$C/foreign.jsonl" ] && limited 200 "$C/foreign.log" $STAPES prepare jsonl "$C/foreign.jsonl" "$C/foreign" \
        --convert wav --max-characters-per-second 1000
}
for part in $PARTS; do case $part in
check) limited 60 "$C/check.log" $PY "$help" check; tail -2 "$C/check.log"; cp -f "$C/check.log" "$OUT/ctc-check.log" ;;
teacher)
    if ! find_teacher; then
        case $VARIANTS in *more*) prepare_foreign & ;; esac
        for name in $TEACHERS; do
            # The new heads first, on the encoder as it is: what a head at random asks of it would spoil it. Then gently.
            case ${name%-spoken} in
            gentle) scales="encoder=0.05 decoder=0.2" ;;
            layers) scales="encoder=0.1 encoder.conv1=0.01 encoder.conv2=0.01 encoder.layers.0=0.01 encoder.layers.1=0.02 encoder.layers.2=0.04 decoder=0.2" ;;
            flat) scales="" ;;
            esac
            sets=(--set optimizer.peak_lr=3e-3 --set optimizer.freeze_steps.encoder=150)
            [ "${name%-spoken}" = flat ] && sets=(--set optimizer.peak_lr=6e-4 --set optimizer.lr_scales.encoder=0.2)
            for each in $scales; do sets+=(--set "optimizer.lr_scales.$each"); done
            # Synthetic speech, where 3-student.sh has made some: its texts are ten times as many.
            [ "$name" != "${name%-spoken}" ] && [ -f "$W/spoken/train.jsonl.gz" ] && sets+=(--train "$W/spoken/train.jsonl.gz")
            TRAIN_SECONDS=${TRAIN_SECONDS:-330} train "teacher-$name" hybrid --train "$C/train.jsonl.gz" "${dev[@]}" \
                --set model.init="$MODEL" --set objective.ctc_weight=0.6 --set model.decoder_layers=3 --set model.decoder_dropout=0.2 \
                --set data.batch_seconds=240 --set data.workers="${TEACHER_WORKERS:-6}" --set data.buckets=24 --set masks.time_masks=3 \
                --set run.steps="$TEACHER_STEPS" --set run.evaluate_every=$(((TEACHER_STEPS + 1) / 2)) \
                --set run.max_minutes="${TEACHER_MINUTES:-4.5}" --set optimizer.warmup_steps=150 ${TRAIN_MORE:-} "${sets[@]}" &
        done
        wait
        found=$($PY "$help" best $(for name in $TEACHERS; do echo "$W/teacher-$name"; done))
        say "teacher by dev: $found"; [ -n "$found" ] && ln -sfn "$found/model" "$C/teacher"
        mkdir -p "$OUT/ctc" && echo "$found" > "$OUT/ctc/teacher.chosen"
    fi ;;
audio)
    find_teacher || { say "no teacher yet"; continue; }
    if [ ! -s "$C/other.jsonl.gz" ]; then
        prepare_foreign
        [ -d "$C/head" ] || $PY "$help" head "$TEACHER" "$C/head"
        # Nothing is known of what is said: every text is kept that is one.
        [ -f "$C/foreign/train.jsonl.gz" ] && limited 200 "$C/other.log" $STAPES label "$C/foreign/train.jsonl.gz" "$C/other.jsonl.gz" \
            --model "$C/head" --normalize basic --max-wer 1e9 --no-vad ${LABEL_MORE:-}
    fi
    cp -f "$C"/*.report.json "$OUT/" 2>/dev/null ;;
train)
    find_teacher || { say "no teacher yet"; continue; }
    say "teacher $TEACHER"
    for seed in $SEEDS; do
        for kind in $VARIANTS; do
            recipe=distill_ctc; sets=(--train "$C/train.jsonl.gz" --set distill.teacher="$TEACHER")
            case $kind in
            alone) recipe=ctc; sets=(--train "$C/train.jsonl.gz") ;;
            taught) ;;
            strict) sets+=(--set distill.label_weight=0.2 --set distill.teacher_weight=1.0) ;;
            more) [ -s "$C/other.jsonl.gz" ] || { say "no other audio: left out"; continue; }; sets+=(--train "$C/other.jsonl.gz") ;;
            esac
            [ "$SPOKEN" = 1 ] && sets+=(--train "$W/spoken/train.jsonl.gz")
            TRAIN_SECONDS=${TRAIN_SECONDS:-330} train "ctc-$kind-$seed" $recipe "${sets[@]}" "${dev[@]}" \
                --set data.vocabulary="$TEACHER" --set model.init="$INIT" --set optimizer.lr_scales.encoder=0.2 \
                --set data.batch_seconds=160 --set data.workers="${WORKERS:-4}" --set run.steps="$STEPS" --set run.evaluate_every="${EVERY:-625}" \
                --set optimizer.peak_lr=6e-4 --set optimizer.warmup_steps=200 --set run.max_minutes="${MAX_MINUTES:-4.5}" \
                --set masks.time_masks=2 --set masks.frequency_masks=2 \
                --set seed="$seed" ${TRAIN_MORE:-} &
        done
        wait
    done
    for run in "$W"/ctc-*-[0-9]; do echo "$(basename "$run")" $(grep -h '"kind": "dev"' "$run/metrics.jsonl" | sed 's/"samples.*//' | cut -c1-120); done ;;
test)
    for seed in $SEEDS; do
        found=$($PY "$help" best $(for kind in $VARIANTS; do [ $kind = alone ] || echo "$W/ctc-$kind-$seed"; done))
        say "chosen by dev: $found"; [ -n "$found" ] || continue
        echo "$found" > "$OUT/ctc-chosen-$seed"
        for corpus in ls so; do
            evaluate "$W/ctc-alone-$seed/model" "$D/$corpus/test.jsonl.gz" "alone-$seed-$corpus" &
            evaluate "$found/model" "$D/$corpus/test.jsonl.gz" "taught-$seed-$corpus" &
            # What the same data came to, where more was chosen: said, not chosen by.
            [ "$(basename "$found")" = "ctc-more-$seed" ] && [ -f "$W/ctc-taught-$seed/model/config.json" ] &&
                evaluate "$W/ctc-taught-$seed/model" "$D/$corpus/test.jsonl.gz" "same-$seed-$corpus" &
        done
        wait
    done
    home_results
    for name in $(cd "$W/results" && ls -d taught-*-[ls][so] alone-*-[ls][so] same-*-[ls][so] 2>/dev/null); do grep -h WER "$W/results/$name.log" | head -1 | sed "s/^/$name /"; done ;;
esac; home_results; echo "DONE adapt 4-ctc $part"; done
