"""The daemon may not be able to read its own files once it is no root: all is imported by then."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import asyncio, sys
from sandboxd import serve
from sandboxd.api.app import create_app
from sandboxd.config import load_config
from sandboxd.runtime.manager import Runtime

serve._import_late_modules()
known = set(sys.modules)

async def main():
    import httpx
    asked = set(sys.modules)
    config = load_config(None, {}, {"runtime_dir": sys.argv[1], "state_dir": sys.argv[1]})
    app = create_app(config, Runtime(config), token="t" * 32)
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app=app)
        headers = {"Authorization": "Bearer " + "t" * 32}
        async with httpx.AsyncClient(
            transport=transport, base_url="http://node", headers=headers
        ) as client:
            for method, url, body in (
                ("GET", "/healthz", None),
                ("GET", "/nowhere", None),
                ("GET", "/openapi.json", None),
                ("GET", "/v1/sandboxes?limit=x", None),
                ("GET", "/v1/images", None),
                ("POST", "/v1/sandboxes", b'{"image": 1}'),
                ("POST", "/v1/sandboxes", b'{"image": "a"}'),
                ("PUT", "/v1/sandboxes/sb-x/files?path=/a", b"x"),
            ):
                await client.request(method, url, content=body)
    return asked

asked = asyncio.run(main())
late = [
    name
    for name in set(sys.modules) - known - asked
    if getattr(sys.modules[name], "__file__", None) and not name.startswith(("httpx", "httpcore"))
]
print(sorted(late))
"""


def test_no_request_imports_anything(tmp_path):
    done = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning", "-c", PROGRAM, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n"
