#!/usr/bin/env bash
# Pre-trained and from nothing, three learning rates each, on the same hour with the same steps: six at once, about
# 150-200 s in all (limit SECONDS_EACH, 240). Then the best of each on dev, once on test (15 s).
# FROM=long2 or FROM=v/group: other pre-trained weights than W/long; TAG=x: a second search, in a folder of its own.
. "$(dirname "$0")/common.sh"
name=${NAME:-$(cat "$W/chosen")}
each=${SECONDS_EACH:-240}; epochs=${EPOCHS:-100}; rates=${RATES:-"2e-4 6e-4 1.8e-3"}; parts=${PARTS:-"pretrained scratch"}; tag=${TAG:-}
mapfile -t settings < "$W/v/$name.settings"
# The twin: the same network with the weights that pre-training began with.
if [ ! -d "$W/scratch/model" ]; then
    rm -rf "$W/scratch"
    stapes train pretrain "${manifests[@]:0:2}" -o "$W/scratch" "${common[@]}" "${settings[@]}" --set run.steps=1 --set optimizer.peak_lr=0 > "$W/scratch.log" 2>&1 || tail -n 3 "$W/scratch.log"
fi
rm -rf "$W/pretrained"; mkdir -p "$W/pretrained"; cp -r "$W/${FROM:-long}/model" "$W/pretrained/model"
tiny=(); [ -n "${TINY:-}" ] && tiny=(--set run.threads=1 --set data.batch_seconds=36 --set run.evaluate_every=2 --set run.evaluate_limit=4)
mkdir -p "$W/f$tag"
for part in $parts; do for rate in $rates; do
    out=$W/f$tag/$part-$rate
    if [ -s "$out.done" ]; then say "$part $rate: there already"; continue; fi
    resume=(); [ -d "$out/checkpoints" ] && resume=(--resume) || rm -rf "$out"
    ( timeout $((each + 90)) $PY -m stapes train wav2vec2 --train "$W/hour.jsonl.gz" --dev "$D/ls/dev.jsonl.gz" -o "$out" \
        --set model.init="$W/$part/model" --set model.dropout=0.1 --set model.layer_drop=0.05 \
        --set optimizer.freeze='[]' --set optimizer.freeze_steps.encoder=0 --set optimizer.peak_lr="$rate" --set optimizer.warmup_steps=250 \
        --set optimizer.clip_norm=1 --set data.batch_seconds=200 --set data.buckets=8 --set data.workers="${FT_WORKERS:-2}" \
        --set augment.speeds='[0.9, 1.0, 1.1]' --set run.epochs="$epochs" --set run.max_minutes="$($PY -c "print($each / 60)")" \
        --set run.log_every=25 --set run.evaluate_every=200 --set run.tensorboard=false --set checkpoint.keep=1 --set checkpoint.keep_best=1 \
        ${EXTRA:-} "${tiny[@]}" "${resume[@]}" > "$out.log" 2>&1 && echo ok > "$out.done" ) &
done; done
wait
for part in $parts; do for rate in $rates; do
    bring "$part$tag/$rate" "$W/f$tag/$part-$rate"
    tail -n 1 "$W/f$tag/$part-$rate.log" | cut -c1-200
done; done
$PY "$HERE/choose.py" "$W/f$tag" | tee "$OUT/chosen$tag.txt"
[ -n "${NO_TEST:-}" ] || for part in $parts; do
    model=$($PY "$HERE/choose.py" "$W/f$tag" "$part")
    rm -rf "$W/test$tag/$part"
    stapes evaluate "$W/f$tag/$model/model" "$D/ls/test.jsonl.gz" -o "$W/test$tag/$part" ${TINY:+--limit 2} > "$W/test-$part$tag.log" 2>&1 || tail -n 3 "$W/test-$part$tag.log"
    mkdir -p "$OUT/test/$part$tag"; cp "$W/test$tag/$part"/*.json* "$OUT/test/$part$tag/"
    $PY -c "import json,sys; r=json.load(open(sys.argv[1])); print(sys.argv[2], {k: round(100 * r[k]['value'], 2) for k in ('cer', 'wer')})" "$OUT/test/$part$tag/result.json" "$part ($model) on test:"
done
say "DONE pretrain finetune"
