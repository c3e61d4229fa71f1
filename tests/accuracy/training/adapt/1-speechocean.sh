#!/usr/bin/env bash
# Line 1: base on speechocean762, as a whole and by LoRA, LibriSpeech not forgotten. Parts, to look between them:
#   lessons  base writes down what it is to rehearse; 3,500 clips: 30 s alone, 60 s beside others (again: nothing)
#   explore  the trainings of VARIANTS at once, STEPS steps of 24 new and 8 rehearsed windows: six of them 110–170 s;
#            more of them later, with VARIANTS naming all, leave those alone that have ended
#   choose   their weights, part of the way from base (SHARES), on both dev sets: six processes, 60–90 s
#   test     base and the chosen two on both test sets, at once: 60–90 s
# Seen in a first try, with LibriSpeech's own bare texts as rehearsal and weights all the way: 19.0 and 20.6 %, and 7.6
# in place of 5.3 % on LibriSpeech.
source "$(dirname "$0")/common.sh"
PARTS=${PARTS:-"lessons explore choose test"}
STEPS=${STEPS:-500}
VARIANTS=${VARIANTS:-"full-2e5 full-5e5 full-encoder lora-all lora-qv lora-encoder"}
export W OUT_DIR=$OUT MODEL
O=$W/so-own; mkdir -p "$O"
all='lora.targets=["query","key","value","out","up","down"]'
settings() {
    case $1 in
    full-2e5) recipe=whisper; more=(optimizer.peak_lr=2e-5) ;;
    full-5e5) recipe=whisper; more=(optimizer.peak_lr=5e-5 model.dropout=0.1 model.decoder_dropout=0.1) ;;
    full-1e4) recipe=whisper; more=(optimizer.peak_lr=1e-4 model.dropout=0.1 model.decoder_dropout=0.1) ;;
    full-half) recipe=whisper; more=(optimizer.peak_lr=5e-5 data.rehearsal_share=0.5) ;;
    full-encoder) recipe=whisper; more=(optimizer.peak_lr=7e-5 'optimizer.freeze=["decoder"]' model.dropout=0.1) ;;
    lora-all) recipe=whisper_lora; more=(optimizer.peak_lr=5e-4 "$all" lora.dropout=0.1) ;;
    lora-all-1e3) recipe=whisper_lora; more=(optimizer.peak_lr=1e-3 "$all" lora.dropout=0.1) ;;
    lora-qv) recipe=whisper_lora; more=(optimizer.peak_lr=1e-3) ;;
    lora-encoder) recipe=whisper_lora; more=(optimizer.peak_lr=1e-3 "$all" 'lora.parts=["encoder"]' lora.dropout=0.1) ;;
    *) say "unknown variant $1"; return 1 ;;
    esac
}
runs=(); for variant in $VARIANTS; do runs+=("$W/so-$variant"); done
for part in $PARTS; do case $part in
lessons)
    if [ ! -f "$O/train.jsonl.gz" ]; then
        if [ ! -f "$O/extra/train.jsonl.gz" ]; then
            $PY "$HERE/extra.py" "$DATA" "$O/extra-raw.jsonl"
            [ -s "$O/extra-raw.jsonl" ] && $STAPES prepare jsonl "$O/extra-raw.jsonl" "$O/extra" --convert wav > "$O/extra.log" 2>&1
        fi
        for name in ls so extra; do
            manifest=$D/$name/train.jsonl.gz; [ $name = extra ] && manifest=$O/extra/train.jsonl.gz
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
        TRAIN_SECONDS=${TRAIN_SECONDS:-230} train "so-$variant" $recipe --train "$O/train.jsonl.gz" --dev "$O/dev.jsonl.gz" \
            --set model.init="$MODEL" --set data.rehearsal="$O/rehearsal.jsonl.gz" --set data.rehearsal_share=0.25 \
            --set labels.timestamps=0.7 --set 'augment.speeds=[0.9,1.0,1.1]' --set run.epochs=none --set run.steps="$STEPS" \
            --set run.evaluate_every=$(((STEPS + 1) / 2)) --set run.max_minutes="${MAX_MINUTES:-2.8}" --set checkpoint.keep_best=1 \
            --set data.workers=2 --set run.tensorboard=false ${TRAIN_MORE:-} "${sets[@]}" &
    done
    wait
    for run in "${runs[@]}"; do echo "$(basename "$run")" "$(grep -h '"kind": "dev"' "$run/metrics.jsonl" | cut -c1-150 | tr '\n' ' ')"; done ;;
choose)
    limited 120 "$W/judge-base.log" $PY "$HERE/speechocean.py" judge "$MODEL" 1 &
    for run in "${runs[@]}"; do
        [ -f "$run/model/training.json" ] && { limited "${JUDGE_SECONDS:-200}" "$W/judge-$(basename "$run").log" $PY "$HERE/speechocean.py" judge "$run" ${SHARES:-} & }
    done
    wait
    $PY "$HERE/speechocean.py" choose "${runs[@]}" | tee "$W/so-choose.log" ;;
test)  # looked at once, by base and the chosen two; the results keep to what they first were
    for name in base full lora; do
        model=$W/so-chosen/$name/model; [ $name = base ] && model=$MODEL
        [ $name = base ] || [ -e "$model" ] || continue
        for corpus in so ls; do evaluate "$model" "$D/$corpus/test.jsonl.gz" "$name-$corpus" & done
    done
    wait
    for name in base-so full-so lora-so base-ls full-ls lora-ls; do grep -h WER "$W/results/$name.log" | head -1 | sed "s/^/$name /"; done ;;
esac; home_results; echo "DONE adapt 1-speechocean $part"; done
