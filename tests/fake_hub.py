"""A Hugging Face hub on this machine, with one model, that can break off, lie and count what it is asked."""

from __future__ import annotations

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

REVISION = "c0ffee" * 6 + "cafe"


class FakeHub:
    """Serves the files of a folder as ``REPOSITORY``; use as a context manager and point HF_ENDPOINT to ``url``.

    ``break_after``: bytes of a large file after which the connection is cut, once. ``corrupt``: a file that arrives
    with a byte changed. ``knows_ranges``: whether it can go on in the middle of a file.
    """

    def __init__(self, repository: str, folder: Path) -> None:
        self.files = {path.name: path.read_bytes() for path in folder.iterdir()}
        self.repository = repository
        self.break_after: int | None = None
        self.breaks = 1
        self.corrupt: str | None = None
        self.knows_ranges = True
        self.requests: list[tuple[str, str | None]] = []
        """(path, Range header) of every file that was asked for."""
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: object) -> None:
                pass

            def do_GET(self) -> None:
                hub.answer(self)

            do_HEAD = do_GET

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def __enter__(self) -> FakeHub:
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        path = request.path.partition("?")[0]
        if path.startswith(f"/api/models/{self.repository}"):
            self.send(request, 200, json.dumps(self.description()).encode(), {"Content-Type": "application/json"})
        elif path.startswith(f"/{self.repository}/resolve/{REVISION}/"):
            self.send_file(request, path.rpartition("/")[2])
        else:
            self.send(request, 404, b"not here", {"X-Error-Code": "RepoNotFound"})

    def description(self) -> dict:
        siblings = []
        for name, content in self.files.items():
            sibling: dict = {"rfilename": name, "size": len(content)}
            if name.endswith(".safetensors"):
                sha = hashlib.sha256(content).hexdigest()
                sibling |= {"blobId": "0" * 40, "lfs": {"sha256": sha, "size": len(content), "pointerSize": 135}}
            else:
                sibling["blobId"] = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
            siblings.append(sibling)
        return {"id": self.repository, "modelId": self.repository, "sha": REVISION, "siblings": siblings, "tags": []}

    def send_file(self, request: BaseHTTPRequestHandler, name: str) -> None:
        wanted = request.headers.get("Range")
        self.requests.append((name, wanted))
        content = self.files[name]
        if name == self.corrupt:
            content = content[:-1] + bytes([content[-1] ^ 1])
        start = int(wanted.removeprefix("bytes=").partition("-")[0]) if wanted and self.knows_ranges else 0
        headers = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": REVISION}
        if wanted and self.knows_ranges:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        cut = None
        if self.break_after is not None and self.breaks and len(content) - start > self.break_after:
            cut, self.breaks = self.break_after, self.breaks - 1
        self.send(request, 206 if "Content-Range" in headers else 200, content[start:], headers, cut)

    @staticmethod
    def send(
        request: BaseHTTPRequestHandler, status: int, body: bytes, headers: dict[str, str], cut: int | None = None
    ) -> None:
        request.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            request.send_header(key, value)
        request.end_headers()
        if request.command != "HEAD":
            request.wfile.write(body[:cut])
            request.wfile.flush()
        if cut is not None:
            request.close_connection = True
