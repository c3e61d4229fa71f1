#!/usr/bin/env bash
# From the chosen variant's weights (W/chosen, or NAME=) with the paper's masks, for MINUTES (7) of training; run it in the
# background. The learning rate falls to nothing at STEPS; by default what the variant's own pace gives, times FASTER
# (1.8), because fewer share the GPU now. Ends by itself; after a kill the same command goes on (--resume). More later:
# TAG=2 FROM=long MINUTES=4 goes on from the weights that this one made, as a run of its own.
. "$(dirname "$0")/common.sh"
name=${NAME:-$(cat "$W/chosen")}
minutes=${MINUTES:-7}; out=$W/long${TAG:-}; from=${FROM:-v/$name}
mapfile -t settings < "$W/v/$name.settings"
if [ ! -s "$out.plan" ]; then
    $PY - "$W/v/$name/metrics.jsonl" "$minutes" "${FASTER:-1.8}" > "$out.plan" <<'P'
import json, sys
train = [r for r in map(json.loads, open(sys.argv[1])) if r["kind"] == "train"]
late = train[len(train) // 3:]
pace = (late[-1]["step"] - late[0]["step"]) / max(1e-9, late[-1]["time"] - late[0]["time"]) if len(late) > 1 else 1.0
print(max(10, int(pace * float(sys.argv[3]) * float(sys.argv[2]) * 60)))
P
    rm -rf "$out.from"; cp -r "$W/$from/model" "$out.from"
fi
steps=${STEPS:-$(cat "$out.plan")}
resume=(); [ -d "$out/checkpoints" ] && resume=(--resume) || rm -rf "$out"
say "from $from: $steps steps or $minutes minutes"
timeout "$($PY -c "print(int(60 * $minutes + 120))")" $PY -m stapes train pretrain "${manifests[@]}" -o "$out" "${common[@]}" "${settings[@]}" \
    --set model.init="$out.from" --set objective.hide_time=0.65 --set objective.hide_time_length=10 --set pretraining.temperature=1.5 \
    --set data.workers="${LONG_WORKERS:-6}" --set run.steps="$steps" --set run.max_minutes="$minutes" ${EXTRA:-} "${resume[@]}" > "$out.log" 2>&1 \
    || { say "exit code $?"; tail -n 5 "$out.log"; }
$PY "$HERE/look.py" "$out/metrics.jsonl" | tee "$OUT/long${TAG:-}.txt"
bring "long${TAG:-}" "$out"
say "DONE pretrain long"
