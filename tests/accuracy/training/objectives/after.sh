#!/usr/bin/env bash
# What a small CTC model is worth, on a CPU: after.sh MODEL [OUT]. LIMIT=N: only so many recordings, for a dry run.
# 1 a 4-gram by beam search against greedy; 2 long recordings against whole utterances; 3 alignment of joined clips.
set -euo pipefail
MODEL=$1; OUT=${2:-/tmp/out/train/after}; D=${D:-/tmp/d}; TEXT=${TEXT:-../shared/data/text/ljspeech.txt}
PYTHON=${PYTHON:-python3}; STAPES="$PYTHON -m stapes"; HERE=$(cd "$(dirname "$0")" && pwd)
LIMIT=${LIMIT:-}; BEAM=${BEAM:-32}; WEIGHTS=${WEIGHTS:-"0.3 0.5 0.7 0.9"}; limit=${LIMIT:+--limit $LIMIT}
HOW="--device cpu --no-vad"
say() { echo "[$(date +%H:%M:%S)] $*"; }
mkdir -p "$OUT"; say "model $(stat -c %s "$MODEL/model.safetensors") bytes, $(python3 -c "import json,sys; print(json.load(open('$MODEL/config.json'))['dtype'])")"

say "4-gram"; LM=$OUT/words.arpa.gz
[ -s "$LM" ] || $STAPES lm build "$TEXT" -o "$LM" --model "$MODEL" --order 4
for weight in $WEIGHTS; do                                   # dev chooses
    $STAPES evaluate "$MODEL" "$D/ls/dev.jsonl.gz" -o "$OUT/dev-lm-$weight" $HOW $limit --lm "$LM" --lm-weight "$weight" --beam-size "$BEAM" > "$OUT/dev-lm-$weight.txt"
done
weight=$($PYTHON "$HERE/after.py" best "$OUT" $WEIGHTS); say "dev chooses --lm-weight $weight"
$STAPES evaluate "$MODEL" "$D/ls/test.jsonl.gz" -o "$OUT/greedy" $HOW $limit > "$OUT/greedy.txt"
$STAPES evaluate "$MODEL" "$D/ls/test.jsonl.gz" -o "$OUT/lm" $HOW $limit --lm "$LM" --lm-weight "$weight" --beam-size "$BEAM" > "$OUT/lm.txt"
$STAPES evaluate "$MODEL" "$D/so/test.jsonl.gz" -o "$OUT/so-greedy" $HOW $limit > "$OUT/so-greedy.txt"
$STAPES compare "$OUT/greedy" "$OUT/lm" --json > "$OUT/compare-lm.json"
$STAPES compare "$OUT/greedy" "$OUT/lm" --markdown "$OUT/compare-lm.md"

say "long recordings"
$PYTHON "$HERE/after.py" join "$D/ls/test.jsonl.gz" "$OUT/joined" ${LIMIT:-0}
$STAPES evaluate "$MODEL" "$OUT/joined/long.jsonl" -o "$OUT/long" $HOW > "$OUT/long.txt"

say "alignment"
for kind in trimmed plain; do
    for wav in "$OUT"/joined/$kind-*.wav; do
        $STAPES align "$wav" "${wav%.wav}.txt" --model "$MODEL" --device cpu --json > "${wav%.wav}.aligned.json"
    done
done
$PYTHON "$HERE/after.py" report "$OUT" "$weight" | tee "$OUT/report.txt"
say "DONE train after"
