"""A headless browser, which is many processes that share memory and descriptors."""

from __future__ import annotations

import struct

import pytest

from tests.e2e.workloads.conftest import MakeMachine

CHROMIUM = ["chromium", "--headless", "--no-sandbox", "--disable-gpu"]
PAGE = "data:text/html,<p id=x></p><script>x.textContent = 6 * 7 + '!'</script>"


def test_the_dom_of_a_page_that_scripts_change(browser: MakeMachine, user: str) -> None:
    with browser(user) as box:
        result = box.try_to([*CHROMIUM, "--dump-dom", PAGE])
        assert result["exit_code"] == 0, result
        assert '<p id="x">42!</p>' in result["stdout"]


def test_a_picture_of_a_page_of_a_local_server(browser: MakeMachine) -> None:
    with browser("agent") as box:
        box.put("site/index.html", "<body style='margin:0;background:#00ff00'>")
        server = "cd site; python3 -m http.server -b 127.0.0.1 8000 >/dev/null 2>&1 </dev/null &"
        box.run(server)
        box.run("timeout 30 bash -c 'until : >/dev/tcp/127.0.0.1/8000; do :; done' 2>/dev/null")
        size = "--window-size=320,200"
        box.run([*CHROMIUM, size, "--screenshot=shot.png", "http://127.0.0.1:8000/"])
        answer = box.daemon.http.get(
            f"/v1/sandboxes/{box.sandbox}/files", params={"path": f"{box.home}/shot.png"}
        )
        # PNG specification, 11.2.2: the signature, then the chunk IHDR.
        assert answer.content[:8] == b"\x89PNG\r\n\x1a\n"
        assert struct.unpack(">II", answer.content[16:24]) == (320, 200)


@pytest.mark.parametrize("shm_mb", [1, 64])
def test_shared_memory_is_small_or_not(browser: MakeMachine, shm_mb: int) -> None:
    """Where /dev/shm is too small, the switch that every guide names makes do without."""
    with browser("agent", shm_mb=shm_mb) as box:
        extra = ["--disable-dev-shm-usage"] if shm_mb == 1 else []
        out = box.run([*CHROMIUM, *extra, "--dump-dom", PAGE])
        assert '<p id="x">42!</p>' in out
