"""The status page in a real browser, over a real node: what it shows, and what it never runs."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.framework.browser import Browser, missing, running_browser
from tests.framework.daemon import Daemon, running_daemon
from tests.framework.leaks import LeakCheck

SMALL = {"memory_mb": 32, "disk_mb": 8, "pids": 16}
HOSTILE = [
    "<img src=x onerror=window.hacked=1>",
    "<script>window.hacked=1</script>",
    '"><svg onload=window.hacked=1>',
    "'-window.hacked=1-'",
]
ROWS = "return [...document.querySelectorAll('#rows tr')].map(r => r.innerText)"


@pytest.fixture(scope="module")
def node(leak_check: LeakCheck, busybox: Path) -> Iterator[Daemon]:
    if (why := missing()) is not None:
        pytest.skip(why)
    with running_daemon(leak_check, {"busybox": busybox}) as daemon:
        daemon.warm_up("busybox")
        yield daemon


@pytest.fixture
def browser(node: Daemon) -> Iterator[Browser]:
    with running_browser() as one:
        one.open(node.base_url + "/")
        yield one


def let_in(browser: Browser, token: str) -> None:
    browser.type("#token", token)
    browser.click("#ask button")


def shown(browser: Browser, what: str) -> None:
    browser.wait("return document.body.innerText.includes(arguments[0])", what)


def test_it_asks_for_the_token_and_shows_the_node(node: Daemon, browser: Browser):
    assert browser.text("#state") == "not connected"
    let_in(browser, "wrong" * 8)
    shown(browser, "not the daemon's")
    assert browser.run("return sessionStorage.length") == 0
    box = node.create("busybox", limits=SMALL, name="mine", run="run-7")
    node.exec(box, ["true"])
    let_in(browser, node.token)
    (row,) = browser.wait(f"const rows = ({ROWS[7:]}); return rows[0]?.includes('sb-') && rows")
    for word in (box, "mine", "run-7", "running", "busybox"):
        assert word in row
    assert re.search(r"\t[0-9.]+ [KM]iB\t", row), row  # its memory
    assert browser.text("#state") == "open"
    # In this tab's storage alone: neither in the address, nor where another tab or day finds it.
    stores = browser.run("return [localStorage.length, document.cookie, location.href]")
    assert stores == [0, "", node.base_url + "/"]
    assert browser.run("return Object.values(sessionStorage)") == [node.token]
    browser.open(node.base_url + "/")
    shown(browser, box)
    browser.click("#leave")
    assert browser.run("return sessionStorage.length") == 0
    assert box not in browser.text()
    node.http.delete(f"/v1/sandboxes/{box}")


def test_use_is_shown_and_sorted_by(node: Daemon, browser: Browser):
    idle = node.create("busybox", limits=SMALL, name="idle")
    busy = node.create("busybox", limits=SMALL, name="busy")
    started = node.http.post(
        f"/v1/sandboxes/{busy}/processes", json={"command": "while :; do :; done"}
    )
    assert started.status_code == 201, started.text
    let_in(browser, node.token)
    browser.wait(
        f"const rows = ({ROWS[7:]}); return rows[0]?.includes('busy') && / [1-9]\\d* %/.test("
        "rows[0].replaceAll('\\t', ' '))"
    )
    browser.click("#columns th:nth-child(2) button")
    assert [row.split("\t")[1] for row in browser.run(ROWS)] == ["busy", "idle"]
    browser.click("#columns th:nth-child(2) button")
    assert [row.split("\t")[1] for row in browser.run(ROWS)] == ["idle", "busy"]
    heads = "return document.querySelector('#columns th:nth-child(2)').ariaSort"
    assert browser.run(heads) == "descending"
    for box in (idle, busy):
        node.http.delete(f"/v1/sandboxes/{box}")


def test_no_name_is_ever_run(node: Daemon, browser: Browser):
    boxes = [
        node.create("busybox", limits=SMALL, name=name, run=name, labels={"l": name})
        for name in HOSTILE
    ]
    let_in(browser, node.token)
    for name in HOSTILE:
        shown(browser, name)
    assert browser.run("return window.hacked") is None
    assert browser.run("return document.querySelectorAll('#rows img, #rows svg').length") == 0
    harmless = ("favicon", "Autofocus")
    refusals = [line for line in browser.log() if not any(one in line for one in harmless)]
    assert refusals == []
    # The control: what does reach the page as markup, the policy refuses.
    script = """
        const one = document.createElement('script');
        try { one.text = 'window.hacked = 1'; document.body.append(one); } catch (error) {}
        try { document.body.innerHTML = '<img src=x onerror=window.hacked=1>'; return 'taken'; }
        catch (error) { return error.name; }"""
    assert browser.run(script) == "TypeError"
    assert browser.run("return window.hacked") is None
    fetched = "return fetch('http://127.0.0.1:1/').then(() => 'sent', error => 'refused')"
    assert browser.run(fetched) == "refused"
    assert any("Content Security Policy" in line for line in browser.log())
    for box in boxes:
        node.http.delete(f"/v1/sandboxes/{box}")


def test_the_node_is_drained_by_two_clicks(node: Daemon, browser: Browser):
    let_in(browser, node.token)
    shown(browser, "Drain …")
    browser.click("#drain")
    browser.click("#sure button[value=no]")
    assert node.http.get("/readyz").status_code == 200
    browser.click("#drain")
    browser.click("#sure button[value=yes]")
    browser.wait("return document.querySelector('#state').innerText === 'draining'")
    refused = node.http.post("/v1/sandboxes", json={"image": "busybox"})
    assert refused.json()["error"]["code"] == "node-draining"
    browser.click("#drain")
    browser.click("#sure button[value=yes]")
    browser.wait("return document.querySelector('#state').innerText === 'open'")
    assert node.http.get("/readyz").status_code == 200


def test_everything_that_can_be_used_has_a_name(node: Daemon, browser: Browser):
    """By the browser's own accessibility tree."""
    box = node.create("busybox", limits=SMALL)
    let_in(browser, node.token)
    shown(browser, box)
    tree = browser.devtools("Accessibility.getFullAXTree", {})["nodes"]
    roles: dict[str, list[str]] = {}
    for one in tree:
        if not one["ignored"]:
            name = one.get("name", {}).get("value", "")
            roles.setdefault(one["role"]["value"], []).append(name)
    for role in ("button", "image", "table", "columnheader", "region", "status"):
        assert role in roles, role
    for role in ("button", "image", "columnheader", "region"):
        assert all(roles[role]), (role, roles[role])
    assert len(roles["image"]) == 3
    node.http.delete(f"/v1/sandboxes/{box}")


def test_the_page_needs_nothing_else_and_tells_nothing(node: Daemon):
    answer = httpx.get(node.base_url + "/")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/html")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert os.uname().nodename not in answer.text
    for word in ("src=", "href=", "url(", "@import", "http://", "https://", "innerHTML ="):
        assert word not in answer.text.replace("http://www.w3.org/2000/svg", ""), word
