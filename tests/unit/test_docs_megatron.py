"""docs/megatron.md says nothing that is not there: tests, flags, refusals, files."""

from __future__ import annotations

import re

from megatron_sr.config import FLAGS
from megatron_sr.megatron.support import REFUSALS
from tests.launch import ROOT

PAGE = ROOT / "docs/megatron.md"
TEXT = PAGE.read_text()


def test_every_named_test_exists():
    defined = {
        name
        for file in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", file.read_text(), re.MULTILINE)
    }
    named = set(re.findall(r"`(test_\w+)`", TEXT))
    assert len(named) > 25
    assert named - defined == set()


def test_every_flag_is_explained():
    flags = {flag for flag in FLAGS.values() if flag.startswith("--")}
    assert {flag for flag in flags if f"`{flag}`" not in TEXT} == set()
    assert set(re.findall(r"--param-rounding[a-z0-9-]*(?<!-)", TEXT)) - flags == set()


def test_every_refusal_is_in_the_table():
    rows = [line for line in TEXT.splitlines() if line.startswith("|") and "| refused |" in line]
    assert {refusal.flag for refusal in REFUSALS if not any(f"`{refusal.flag}`" in row for row in rows)} == set()


def test_links_lead_somewhere():
    links = re.findall(r"\]\((?!http)([^)#]*)(#[^)]*)?\)", TEXT)
    assert len(links) > 5
    assert [link for link, _ in links if link and not (PAGE.parent / link).exists()] == []
    titles = {
        re.sub(r"[^\w -]", "", line.lstrip("# ").lower()).replace(" ", "-")
        for line in TEXT.splitlines()
        if line[:1] == "#"
    }
    assert [anchor for link, anchor in links if not link and anchor[1:] not in titles] == []


def test_named_files_exist():
    named = set(re.findall(r"(?<![\w/])((?:tests|tools|patches|examples)/[\w./]+\w)", TEXT))
    assert len(named) >= 3
    assert [name for name in named if not (ROOT / name).exists()] == []
