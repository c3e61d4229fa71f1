#!/usr/bin/env bash
# Four variants at once (ONLY="group slow layer": three), SECONDS_EACH (90) each, on one GPU; about 120 s in all. Then W/chosen names the best on dev.
# ONLY="group layer" runs some of them. (paper is never chosen
# by itself: its dev figures are of other masks. NAME=paper for the next scripts takes it.)
. "$(dirname "$0")/common.sh"
each=${SECONDS_EACH:-90}
limit=$($PY -c "print($each / 60)")
variant() {  # name, settings
    local name=$1; shift
    case " ${ONLY:-group layer slow paper} " in *" $name "*) ;; *) return;; esac
    if [ -s "$W/v/$name/metrics.jsonl" ] && [ ! -f "$W/v/$name.redo" ]; then say "$name: there already"; return; fi
    mkdir -p "$W/v"
    printf '%s\n' "$@" > "$W/v/$name.settings"
    timeout $((each + 120)) $PY -m stapes train pretrain "${manifests[@]}" -o "$W/v/$name" "${common[@]}" "$@" ${EXTRA:-} \
        --set run.steps=12000 --set run.max_minutes="$limit" > "$W/v/$name.log" 2>&1 &
    say "$name: process $!"
}
size() { [ -n "${TINY:-}" ] && echo 12 || echo "$1"; }
# Short masks first: with the paper's spans of 10 frames a small model stays at chance for hundreds of steps, for its
# codes say nothing yet that could be heard so far away (tried on a CPU); the long run has the paper's. group: the base
# models' norm, after each sublayer; layer: the large models', before it, which takes higher rates; paper: long masks at once;
# slow: a gentler rate, should 1e-3 be too much.
easy=(--set objective.hide_time=0.5 --set objective.hide_time_length=4)
variant group "${easy[@]}" --set data.batch_seconds="$(size 400)" --set optimizer.peak_lr=1e-3 --set optimizer.warmup_steps=200 --set pretraining.codes=160
variant layer "${easy[@]}" --set data.batch_seconds="$(size 400)" --set optimizer.peak_lr=1.5e-3 --set optimizer.warmup_steps=200 --set pretraining.codes=160 --set pretraining.conv_norm=layer
variant slow "${easy[@]}" --set data.batch_seconds="$(size 400)" --set optimizer.peak_lr=5e-4 --set optimizer.warmup_steps=200 --set pretraining.codes=160
variant paper --set data.batch_seconds="$(size 400)" --set optimizer.peak_lr=1e-3 --set optimizer.warmup_steps=200 --set pretraining.codes=160
wait
$PY "$HERE/look.py" "$W"/v/*/metrics.jsonl | tee "$OUT/variants.txt"
$PY "$HERE/look.py" --best "$W"/v/[gls]*/metrics.jsonl > "$W/chosen"
for log in "$W"/v/*.log; do grep -a -i -E "error|collapsed|not finite|out of memory" "$log" | head -n 2; done
for folder in "$W"/v/*/; do bring "$(basename "$folder")" "$folder"; done
say "chosen: $(cat "$W/chosen")"
say "DONE pretrain variants"
