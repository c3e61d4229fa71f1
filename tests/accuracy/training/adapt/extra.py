# pyright: basic
"""Other English for the student: asterisk's en, Common Voice's en, LJSpeech, as one JSON-lines manifest.

extra.py DATA OUT.jsonl — what is not on the machine is left out.
"""

import json
import sys
from pathlib import Path

data, out = Path(sys.argv[1]), Path(sys.argv[2])
rows = []
for name in ("asterisk", "commonvoice", "ljspeech"):
    path = data / name / "manifest.jsonl"
    for line in path.open(encoding="utf-8") if path.exists() else ():
        row = json.loads(line)
        audio = path.parent / row["audio"]
        if row.get("lang", "en") == "en" and row["duration"] >= 1.0 and audio.exists():
            rows.append(row | {"audio": str(audio), "split": "train", "lang": "en"})
out.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
print(len(rows), "recordings,", round(sum(row["duration"] for row in rows) / 60, 1), "minutes")
