#!/usr/bin/env bash
# Line 1: base on speechocean762, as a whole and by LoRA, LibriSpeech not forgotten. Parts, to look between them:
#   lessons  base writes down what it is to rehearse, SPOKEN of the synthetic sentences of 3-student.sh too where they are
#            there; 4,300 clips: 40 s alone, 75 s beside others (again: nothing)
#   explore  the trainings of VARIANTS at once, STEPS steps of 16 new and 8 rehearsed windows (-long: half as many more):
#            seven of them 170–200 s, 12 GB each; more of them later, with VARIANTS naming all, leave those alone that
#            have ended
#   choose   their weights, part of the way from base (SHARES), and greedy averages of several (SOUP_SHARES), on both dev
#            sets, in JOBS processes: 90 s; CHOOSE_SECONDS ends it
#   test     base and the chosen two on both test sets, at once: 60–90 s
source "$(dirname "$0")/common.sh"
PARTS=${PARTS:-"lessons explore choose test"}
STEPS=${STEPS:-600}; SPOKEN=${SPOKEN:-800}
VARIANTS=${VARIANTS:-"full-1e5-long full-2e5 full-2e5-again full-2e5-kl lora-all lora-encoder lora-all-kl"}
export W OUT_DIR=$OUT MODEL
O=$W/so-own; mkdir -p "$O"
all='lora.targets=["query","key","value","out","up","down"]'
# What it was teaches it, where it rehearses: all that it expects there, beside the texts.
kl=(distill.teacher="$MODEL" distill.where=rehearsal distill.label_weight=1 distill.teacher_weight=2 distill.temperature=1)
settings() {
    recipe=whisper; steps=$STEPS
    case $1 in lora-*) recipe=whisper_lora ;; esac
    case $1 in
    full-1e5-long) steps=$((STEPS * 3 / 2)); more=(optimizer.peak_lr=1e-5) ;;
    full-2e5) more=(optimizer.peak_lr=2e-5) ;;
    full-2e5-again) more=(optimizer.peak_lr=2e-5 seed=1) ;;
    full-2e5-kl) more=(optimizer.peak_lr=2e-5 seed=2 "${kl[@]}") ;;
    full-4e5-kl) more=(optimizer.peak_lr=4e-5 seed=3 "${kl[@]}") ;;
    lora-all) more=(optimizer.peak_lr=5e-4 "$all" lora.dropout=0.1) ;;
    lora-all-again) more=(optimizer.peak_lr=5e-4 "$all" lora.dropout=0.1 seed=1) ;;
    lora-all-kl) more=(optimizer.peak_lr=5e-4 "$all" lora.dropout=0.1 seed=2 "${kl[@]}") ;;
    lora-encoder) more=(optimizer.peak_lr=1e-3 "$all" 'lora.parts=["encoder"]' lora.dropout=0.1) ;;
    *) say "unknown variant $1"; return 1 ;;
    esac
}
# Rooms and noises where there are some: another classroom than that of the training speakers.
sounds=()
ls "$DATA"/noise-rir/sb_rir*.flac > /dev/null 2>&1 && sounds=(
    --set "augment.rooms=[\"$DATA/noise-rir/sb_rir*.flac\"]" --set augment.room_probability=0.1
    --set "augment.noises=[\"$DATA/noise-rir/sb_noise*.flac\",\"$DATA/noise-rir/sc_*.flac\"]"
    --set augment.noise_probability=0.25 --set 'augment.snr_db=[10,30]')
runs=(); for variant in $VARIANTS; do runs+=("$W/so-$variant"); done
for part in $PARTS; do case $part in
lessons)
    if [ ! -f "$O/train.jsonl.gz" ]; then
        if [ ! -f "$O/extra/train.jsonl.gz" ]; then
            $PY "$HERE/extra.py" "$DATA" "$O/extra-raw.jsonl"
            [ -s "$O/extra-raw.jsonl" ] && $STAPES prepare jsonl "$O/extra-raw.jsonl" "$O/extra" --convert wav > "$O/extra.log" 2>&1
        fi
        [ -f "$W/spoken/train.jsonl.gz" ] && [ "$SPOKEN" -gt 0 ] && mkdir -p "$O/spoken" &&
            $PY "$HERE/speechocean.py" some "$W/spoken/train.jsonl.gz" "$O/spoken/train.jsonl.gz" "$SPOKEN"
        for name in ls so extra spoken; do
            manifest=$D/$name/train.jsonl.gz
            case $name in extra | spoken) manifest=$O/$name/train.jsonl.gz ;; esac
            [ -f "$manifest" ] || continue
            [ -f "$O/$name.report.json" ] && continue
            # The window as training hears it, silence and all: its times are what is to be rehearsed.
            limited 240 "$O/$name.log" $STAPES label "$manifest" "$O/$name.jsonl.gz" --model "$MODEL" --max-wer 0.2 \
                --language en --no-vad ${LABEL_MORE:-} &
        done
        wait
        $PY "$HERE/speechocean.py" lessons "$O" "$D/ls/train.jsonl.gz" "$D/ls/dev.jsonl.gz" "$D/so/train.jsonl.gz" "$D/so/dev.jsonl.gz"
    fi
    mkdir -p "$OUT/so-own"; cp -f "$O"/*.report.json "$OUT/so-own/" ;;
explore)
    for variant in $VARIANTS; do
        settings "$variant" || continue
        sets=(); for each in "${more[@]}"; do sets+=(--set "$each"); done
        TRAIN_SECONDS=${TRAIN_SECONDS:-260} train "so-$variant" $recipe --train "$O/train.jsonl.gz" --dev "$O/dev.jsonl.gz" \
            --set model.init="$MODEL" --set data.rehearsal="$O/rehearsal.jsonl.gz" --set data.rehearsal_share=0.35 \
            --set data.batch_seconds=720 --set labels.timestamps=0.7 --set 'augment.speeds=[0.9,1.0,1.1]' "${sounds[@]}" \
            --set run.epochs=none --set run.steps="$steps" --set run.max_minutes="${MAX_MINUTES:-3.3}" \
            --set run.evaluate_every="$steps" --set run.evaluate_limit=80 --set checkpoint.keep_best=1 \
            --set data.workers=2 --set run.tensorboard=false ${TRAIN_MORE:-} "${sets[@]}" &
    done
    wait
    for run in "${runs[@]}"; do echo "$(basename "$run")" "$(grep -h '"kind": "dev"' "$run/metrics.jsonl" | cut -c1-150 | tr '\n' ' ')"; done ;;
choose)
    limited "${JUDGE_SECONDS:-240}" "$W/so-choose.log" $PY "$HERE/speechocean.py" choose "${runs[@]}"
    grep -hE "S/D/I|chosen" "$W/so-choose.log" | tail -60; cp -f "$W/so-choose.log" "$OUT/" ;;
test)  # looked at once, by base and the chosen two; the results keep to what they first were
    for name in base full lora; do
        model=$W/so-chosen/$name/model; [ $name = base ] && model=$MODEL
        [ $name = base ] || [ -e "$model" ] || continue
        for corpus in so ls; do evaluate "$model" "$D/$corpus/test.jsonl.gz" "$name-$corpus" & done
    done
    wait
    for name in base-so full-so lora-so base-ls full-ls lora-ls; do grep -h WER "$W/results/$name.log" | head -1 | sed "s/^/$name /"; done ;;
esac; home_results; echo "DONE adapt 1-speechocean $part"; done
