#!/usr/bin/env bash
# Texts spoken, and a manifest of them: speak.sh TEXTS.txt OUT [COUNT]. 24 h of the default voices take 16 cores 2 minutes.
# Debian's package flite: FLITE_BIN and FLITE_LIB say where its programs and libraries are, where it is not installed.
# hibari-tts: SPEAK_PYTHONPATH, where that package and onnxruntime are, if not installed. VOICES: see speak.py.
set -uo pipefail
HERE=$(cd "$(dirname "$0")" && pwd); PY=${PY:-python3}; STAPES=${STAPES:-"python3 -m stapes"}
texts=$1; out=$2; shift 2
mkdir -p "$out"
[ -f "$out/train.jsonl.gz" ] && { echo "$out is there"; exit 0; }
env LD_LIBRARY_PATH="${FLITE_LIB:-}${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" OMP_NUM_THREADS=1 \
    PYTHONPATH="${PYTHONPATH:-}${SPEAK_PYTHONPATH:+:$SPEAK_PYTHONPATH}" $PY "$HERE/speak.py" "$texts" "$out" "$@" || exit 1
$STAPES prepare jsonl "$out/spoken.jsonl" "$out" --keep-duplicates || test $? = 1
