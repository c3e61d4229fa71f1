#!/usr/bin/env bash
# Line 3: a student of base with 2 decoder layers. Parts, in order: speak, join, label, train, long, evaluate, draft.
# speak: 13,100 sentences, ~24 h, 16 cores 2 min, no GPU. join: ~50 h of windows, 16 cores 40 s, no GPU. label: base writes
# down 6,500 windows, 50 s. train: VARIANTS at the same time for STEPS steps or MINUTES. long: the one that dev chose goes
# on, alone, for LONG_STEPS or LONG_MINUTES. evaluate: 214 clips, 10 s each. draft: on a quiet GPU, 60–90 s.
source "$(dirname "$0")/common.sh"
PARTS=${PARTS:-"speak join label train long evaluate"}
VARIANTS=${VARIANTS:-"spread noisy plain fast inner late"}; STEPS=${STEPS:-1000}; MINUTES=${MINUTES:-3.6}
LONG_STEPS=${LONG_STEPS:-4000}; LONG_MINUTES=${LONG_MINUTES:-4.6}; EVERY=${EVERY:-250}
SPEAK_COUNT=${SPEAK_COUNT:-13100}; WHOLE=${WHOLE:-1}; PIECES=${PIECES:-4}; COUNT=${COUNT:-60}; ROUNDS=${ROUNDS:-3}
L=$W/windows; mkdir -p "$L"
chosen() {  # chosen NAME…: the training with the lowest WER on dev
    $PY - "$W" "$@" <<'P'
import json, sys
found = {}
for name in sys.argv[2:]:
    try:
        for line in open(f"{sys.argv[1]}/student-{name}/metrics.jsonl"):
            row = json.loads(line)
            if row["kind"] == "dev":
                found[name] = min(found.get(name, 9), row["wer"])
    except FileNotFoundError:
        pass
print(min(found, key=found.get)); print({name: round(found[name], 4) for name in sorted(found, key=found.get)}, file=sys.stderr)
P
}
settings() {  # what a variant differs in; all leave the encoder and the embedding as they are
    more=(--set distill.prefix_noise=0.15 --set optimizer.peak_lr=3e-4 --set distill.label_weight=0.2)
    case $1 in
    spread) more+=(--set 'distill.layers=[0,5]') ;;
    inner) more+=(--set 'distill.layers=[0,4]') ;;
    late) more+=(--set 'distill.layers=[3,5]') ;;
    last) more+=(--set 'distill.layers=[4,5]') ;;
    middle) more+=(--set 'distill.layers=[2,5]') ;;
    noisy) more+=(--set 'distill.layers=[0,5]' --set distill.prefix_noise=0.3 --set distill.label_weight=0) ;;
    plain) more+=(--set 'distill.layers=[0,5]' --set distill.prefix_noise=0) ;;
    fast) more+=(--set 'distill.layers=[0,5]' --set optimizer.peak_lr=1e-3) ;;
    *) say "no variant $1"; return 1 ;;
    esac
}
student() {  # student NAME STEPS MINUTES WORKERS [settings]
    local name=$1 steps=$2 minutes=$3 workers=$4; shift 4
    # Windows have their speed, loudness and noise already: reading them is all that the processes do.
    train "student-$name" distill $(for each in "$L"/*.jsonl.gz; do echo "--train $each"; done) --dev "$D/ls/dev.jsonl.gz" \
        --set distill.teacher="$MODEL" --set distill.temperature=1 --set labels.timestamps=0.5 --set labels.prompts=0 \
        --set 'optimizer.freeze=["encoder","decoder.embedding"]' --set optimizer.warmup_steps=50 --set optimizer.ema=0.99 \
        --set model.decoder_dropout=0.05 --set 'augment.speeds=[1.0]' --set augment.gain_probability=0 \
        --set run.epochs=none --set run.steps="$steps" --set run.max_minutes="$minutes" --set run.evaluate_every="$EVERY" \
        --set data.workers="$workers" --set data.buckets=1 --set checkpoint.keep_best=1 --set run.tensorboard=false \
        ${TRAIN_MORE:-} "$@"
}
for part in $PARTS; do case $part in
speak)
    limited 400 "$W/speak.log" bash "$HERE/speak.sh" "$DATA/text/ljspeech.txt" "$W/spoken" "$SPEAK_COUNT" ;;
join)
    if [ ! -f "$W/extra/train.jsonl.gz" ]; then
        $PY "$HERE/extra.py" "$DATA" "$W/extra.jsonl"
        [ -s "$W/extra.jsonl" ] && $STAPES prepare jsonl "$W/extra.jsonl" "$W/extra" --convert wav > "$W/extra.log" 2>&1
    fi
    export NOISES="$DATA/noise-rir/sb_noise*.flac $DATA/noise-rir/sc_*.flac" RIRS="$DATA/noise-rir/sb_rir*.flac"
    [ -f "$W/heard/joined.jsonl.gz" ] || limited 240 "$W/join.log" env OMP_NUM_THREADS=1 $PY "$HERE/join.py" "$W/heard" \
        "$WHOLE" "$PIECES" 0 $(ls "$D/ls/train.jsonl.gz" "$D/so/train.jsonl.gz" "$W/extra/train.jsonl.gz" 2>/dev/null)
    [ -f "$W/said/joined.jsonl.gz" ] || [ ! -f "$W/spoken/train.jsonl.gz" ] || limited 240 "$W/join.log" \
        env OMP_NUM_THREADS=1 $PY "$HERE/join.py" "$W/said" 1 0 1 "$W/spoken/train.jsonl.gz" ;;
label)
    for name in heard said; do
        [ -f "$W/$name/joined.jsonl.gz" ] || continue
        [ -f "$L/$name.jsonl.gz" ] && [ -f "$L/$name.report.json" ] && continue
        # 0.5: what base mishears is what it writes, and the student is to write what it writes. Loops are left out.
        limited 240 "$L/$name.log" $STAPES label "$W/$name/joined.jsonl.gz" "$L/$name.jsonl.gz" --model "$MODEL" \
            --max-wer 0.5 --language en ${LABEL_MORE:-}
        tail -4 "$L/$name.log"
    done
    mkdir -p "$OUT/labelled"; cp -f "$L"/*.report.json "$OUT/labelled/" ;;
train)
    for variant in $VARIANTS; do
        settings "$variant" || continue
        student "$variant" "$STEPS" "$MINUTES" "${WORKERS:-2}" --set distill.decoder_layers=2 "${more[@]}" &
    done
    wait; chosen $VARIANTS ;;
long)
    [ -s "$W/student.variant" ] || chosen $VARIANTS > "$W/student.variant"
    best=$(cat "$W/student.variant"); settings "$best"; say "goes on: $best"
    # From its own weights: layers are those that it has.
    more+=(--set "model.init=$W/student-$best/model" --set distill.decoder_layers=none --set 'distill.layers=[]')
    student long "$LONG_STEPS" "$LONG_MINUTES" "${LONG_WORKERS:-8}" "${more[@]}" ;;
evaluate)
    # The student is chosen by dev; test is looked at once, by it alone.
    best=$(chosen $VARIANTS long)
    say "chosen by dev: $best"; echo "$best" > "$W/student.chosen"; cp "$W/student.chosen" "$OUT/"
    ln -sfn "$W/student-$best" "$W/student"
    evaluate "$MODEL" "$D/ls/test.jsonl.gz" teacher-ls
    evaluate "$W/student-$best/model" "$D/ls/test.jsonl.gz" student-ls
    for name in teacher-ls student-ls; do grep -hE "WER|real time" "$W/results/$name.log" | sed "s/^/$name /"; done ;;
draft)  # wants a quiet GPU
    limited 400 "$W/draft.log" $PY "$HERE/draft.py" "$MODEL" "$(readlink -f "$W/student")/model" "$D/ls/test.jsonl.gz" \
        "$COUNT" "$ROUNDS" "$W/draft.json"
    # The same by `stapes evaluate`, one window at a time: the texts of all of the test must be the same lines.
    evaluate "$MODEL" "$D/ls/test.jsonl.gz" teacher1-ls --batch-size 1
    evaluate "$MODEL" "$D/ls/test.jsonl.gz" draft1-ls --batch-size 1 --draft "$(readlink -f "$W/student")/model"
    $PY - "$W/results" <<'P' | tee "$W/draft.same"
import json, sys
texts = [{r["id"]: r["hypothesis"] for r in map(json.loads, open(f"{sys.argv[1]}/{n}/utterances.jsonl"))} for n in ("teacher1-ls", "draft1-ls")]
differ = [k for k in texts[0] if texts[0][k] != texts[1].get(k)]
print(f"stapes evaluate with and without --draft: {len(texts[0])} recordings, {len(differ)} texts differ", differ[:5])
P
    cp -f "$W/draft.json" "$W/draft.log" "$W/draft.same" "$OUT/"; tail -3 "$W/draft.log" ;;
esac; home_results; echo "DONE adapt 3-student $part"; done
