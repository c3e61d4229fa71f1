"""The page's files: what they may load, that they are whole, and how they are served."""

from __future__ import annotations

import re
from importlib import resources

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from stapes.serving.page import CONTENT_SECURITY_POLICY, page_router

WEB = resources.files("stapes.serving") / "web"
FILES = {entry.name: entry.read_bytes() for entry in WEB.iterdir() if entry.is_file()}


@pytest.fixture(scope="module")
def client() -> TestClient:
    app = FastAPI()
    app.include_router(page_router())
    return TestClient(app)


def test_every_file_is_served_with_its_type_and_the_policy(client: TestClient) -> None:
    types = {"js": "text/javascript", "css": "text/css", "svg": "image/svg+xml", "html": "text/html"}
    for name, content in FILES.items():
        answer = client.get("/" if name == "index.html" else f"/{name}")
        assert answer.status_code == 200
        assert answer.content == content
        assert answer.headers["content-type"].startswith(types[name.rsplit(".", 1)[1]])
        assert answer.headers["content-security-policy"] == CONTENT_SECURITY_POLICY
        assert answer.headers["x-content-type-options"] == "nosniff"


def test_policy_allows_nothing_inline_and_nothing_from_elsewhere() -> None:
    assert CONTENT_SECURITY_POLICY.startswith("default-src 'none'")
    sources = set(re.findall(r"\S+", re.sub(r"\b[a-z-]+(-src|-uri|-action|-ancestors)\b", "", CONTENT_SECURITY_POLICY)))
    assert {source.rstrip(";") for source in sources} - {""} == {"'none'", "'self'", "blob:"}


def test_unchanged_files_are_not_sent_again(client: TestClient) -> None:
    first = client.get("/app.js")
    again = client.get("/app.js", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert client.head("/app.js").headers["content-length"] == str(len(first.content))


@pytest.mark.parametrize("path", ["/../page.py", "/%2e%2e/page.py", "/index.html/", "/web/app.js", "/app.js%00"])
def test_nothing_else_is_served(client: TestClient, path: str) -> None:
    assert client.get(path).status_code == 404


def test_page_names_no_other_server_and_no_missing_file() -> None:
    for name, content in FILES.items():
        text = content.decode()
        addresses = set(re.findall(r"(?:https?:)?//[a-z0-9.-]+\.[a-z]{2,}[^\s\"']*", text))
        assert addresses <= {"http://www.w3.org/2000/svg"}, name
        loaded = re.findall(r"""(?:from |import |URL\(|src=|href=)["']\.?/?([\w.-]+\.\w+)["']""", text)
        assert set(loaded) <= FILES.keys(), name


def test_markup_has_no_inline_code_and_every_id_that_scripts_ask_for() -> None:
    page = FILES["index.html"].decode()
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", page)
    ids = re.findall(r'\sid="([\w-]+)"', page)
    assert len(ids) == len(set(ids))
    scripts = " ".join(content.decode() for name, content in FILES.items() if name.endswith(".js"))
    assert set(re.findall(r'byId\("([\w-]+)"\)', scripts)) <= set(ids)


def test_colours_are_readable_in_both_schemes() -> None:
    """WCAG 2.2: 4.5 to 1 for text, on every ground that it stands on."""
    style = FILES["style.css"].decode()
    light = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", style[: style.index("@media")]))
    dark = light | dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", style[style.index("@media") :]))
    pairs = [(text, ground) for text in ("ink", "muted") for ground in ("paper", "raised", "view")]
    pairs += [("accent", "paper"), ("accent", "accent-soft"), ("on-accent", "accent"), ("problem", "problem-soft")]
    for scheme in (light, dark):
        for text, ground in pairs:
            assert _contrast(scheme[text], scheme[ground]) >= 4.5, (text, ground)


def _contrast(one: str, other: str) -> float:
    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)
