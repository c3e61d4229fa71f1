#!/usr/bin/env bash
# Line 3: a student of base with 2 decoder layers. Parts, in order: label, join, train, evaluate; draft alone.
# label: 3,300 clips with base, alone 15 s, beside others 40 s. join: 6 × 4 h of WAV on 8 cores, 20 s. train: STEPS steps
# of 32 windows with the encoder only forwards, alone ~45 ms a step: 1,200 steps of each of two variants are 110 s alone.
# evaluate: 214 clips, 10 s each. draft: on a quiet GPU, 60–90 s.
source "$(dirname "$0")/common.sh"
PARTS=${PARTS:-"label join train evaluate"}
STEPS=${STEPS:-1200}; VARIANTS=${VARIANTS:-"kept free"}; COPIES=${COPIES:-6}; COUNT=${COUNT:-60}; ROUNDS=${ROUNDS:-3}
L=$W/labelled; mkdir -p "$L"
for part in $PARTS; do case $part in
label)
    if [ ! -f "$L/extra/train.jsonl.gz" ]; then
        $PY "$HERE/extra.py" "$DATA" "$L/extra.jsonl"
        [ -s "$L/extra.jsonl" ] && $STAPES prepare jsonl "$L/extra.jsonl" "$L/extra" --convert wav > "$L/extra.log" 2>&1
    fi
    for name in ls so extra; do
        manifest=$D/$name/train.jsonl.gz; [ $name = extra ] && manifest=$L/extra/train.jsonl.gz
        [ -f "$manifest" ] || continue
        [ -f "$L/$name.jsonl.gz" ] && [ -f "$L/$name.report.json" ] && continue
        # 0.2: a word of five. What base mishears there, and where it loops, is no lesson.
        limited 240 "$L/$name.log" $STAPES label "$manifest" "$L/$name.jsonl.gz" --model "$MODEL" --max-wer 0.2 --language en ${LABEL_MORE:-}
        tail -4 "$L/$name.log"
    done
    mkdir -p "$OUT/labelled"; cp -f "$L"/*.report.json "$OUT/labelled/" ;;
join)
    [ -f "$L/joined/joined.jsonl.gz" ] ||
        limited 240 "$L/join.log" $PY "$HERE/join.py" "$L/joined" "$COPIES" 0 $(ls "$L"/ls.jsonl.gz "$L"/so.jsonl.gz "$L"/extra.jsonl.gz 2>/dev/null) ;;
train)
    for variant in $VARIANTS; do
        case $variant in
        kept) more=(--set 'optimizer.freeze=["encoder","decoder.embedding"]' --set optimizer.peak_lr=3e-4) ;;
        free) more=(--set optimizer.peak_lr=2e-4) ;;
        drop) more=(--set 'optimizer.freeze=["encoder","decoder.embedding"]' --set optimizer.peak_lr=3e-4
                --set model.decoder_dropout=0.1 --set distill.label_weight=0.3) ;;
        esac
        train "student-$variant" distill --train "$L/joined/joined.jsonl.gz" --train "$L/ls.jsonl.gz" \
            --dev "$D/ls/dev.jsonl.gz" --set distill.teacher="$MODEL" --set distill.decoder_layers=2 \
            --set labels.timestamps=0.7 --set run.epochs=none --set run.steps="$STEPS" --set run.evaluate_every="${EVERY:-200}" \
            --set run.max_minutes="${MAX_MINUTES:-5}" --set data.workers=3 --set checkpoint.keep_best=1 \
            --set run.tensorboard=false ${TRAIN_MORE:-} "${more[@]}" &
    done
    wait ;;
evaluate)
    # The student is chosen by dev; test is looked at once, by it alone.
    best=$($PY - "$W" $VARIANTS <<'P'
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
print(min(found, key=found.get)); print(found, file=sys.stderr)
P
)
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
