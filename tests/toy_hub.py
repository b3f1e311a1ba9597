"""A hub of one data set on this machine: it answers what huggingface_hub and datasets ask for, out of a folder."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def serving(root: Path, name: str) -> Iterator[tuple[str, list[str]]]:
    """(address, paths of the files that were asked for, as they come)."""
    files = {p.relative_to(root).as_posix(): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *about: object) -> None:
            pass

        def answer(self, code: int, body: bytes, **headers: str) -> None:
            self.send_response(code)
            for key, value in ({"Content_Length": str(len(body))} | headers).items():
                self.send_header(key.replace("_", "-"), value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def do_GET(self) -> None:
            path = unquote(self.path.split("?")[0])
            if m := re.fullmatch(rf"/datasets/{name}/resolve/[^/]+/(.+)", path):
                self.file(m[1])
            elif m := re.fullmatch(rf"/api/datasets/{name}/tree/[^/]+/?(.*)", path):
                self.listing(m[1])
            elif re.fullmatch(rf"/api/datasets/{name}(/revision/[^/]+)?", path):
                self.answer(200, json.dumps({"id": name, "sha": COMMIT, "siblings": [{"rfilename": f} for f in files]}).encode())
            else:
                self.answer(404, b"{}", X_Error_Code="RepoNotFound")

        do_HEAD = do_GET

        def file(self, path: str) -> None:
            about = {"ETag": f'"{COMMIT}"', "X_Repo_Commit": COMMIT, "Accept_Ranges": "bytes"}
            if path not in files:
                return self.answer(404, b"", X_Error_Code="EntryNotFound", X_Repo_Commit=COMMIT)
            data = files[path]
            if self.command == "GET":
                asked.append(path)
            if m := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or ""):
                lo, hi = int(m[1]), min(int(m[2] or len(data)), len(data) - 1)
                return self.answer(206, data[lo : hi + 1], Content_Range=f"bytes {lo}-{hi}/{len(data)}", **about)
            return self.answer(200, data, **about)

        def listing(self, under: str) -> None:
            """What is directly in a folder."""
            inside = [f[len(under) :].lstrip("/") for f in files if not under or f.startswith(f"{under}/")]
            names = sorted({f.split("/")[0] for f in inside})
            entries = [
                {
                    "type": "file" if name in inside else "directory",
                    "path": f"{under}/{name}".lstrip("/"),
                    "size": len(files.get(f"{under}/{name}".lstrip("/"), b"")),
                    "oid": COMMIT,
                }
                for name in names
            ]
            self.answer(200, json.dumps(entries).encode())

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
