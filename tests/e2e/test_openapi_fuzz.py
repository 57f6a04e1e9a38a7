"""Requests made from the OpenAPI document, good and bad ones, to a real daemon.

Found wanting: an answer of 500 and above, a status or a content type that the document does not
name, a body that is not as its schema says. What is asked in the name of a sandbox is asked of a
living one, or nearly all would end at 404.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS

from tests.framework.daemon import Daemon

EXAMPLES = int(os.environ.get("SANDBOXD_TESTS_FUZZ_EXAMPLES", "12"))
CHECKED = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
)
WAITS = ("wait_s", "timeout_s", "grace_s", "idle_output_timeout_s", "within_s")
"""Times that a request may ask the daemon to take; many short ones find more than a long one."""
for kind in ("application/x-tar", "application/gzip"):
    schemathesis.serializer.alias(kind, "application/octet-stream")

SETTINGS = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
def test_every_answer_is_documented(daemon: Daemon, mode: GenerationMode):
    document = schemathesis.openapi.from_dict(daemon.http.get("/openapi.json").json())
    headers = {"Authorization": f"Bearer {daemon.token}"}
    living: dict[str, str] = {"id": "none-yet"}
    findings = []
    with requests.Session() as session:
        for result in document.get_all_operations():
            operation = result.ok()

            asked = ""

            @given(case=operation.as_strategy(generation_mode=mode))
            @SETTINGS
            def ask(case: Any) -> None:
                nonlocal asked
                tame(case, daemon, living)
                asked = case.as_curl_command()
                case.call_and_validate(
                    base_url=daemon.base_url,
                    headers=headers,
                    session=session,
                    checks=CHECKS.get_by_names(CHECKED),
                    timeout=60,
                )

            try:
                ask()
            except Unsatisfiable:
                continue  # nothing that is wrong can be said to it
            except BaseException as error:  # noqa: BLE001 - one operation's is not the others'
                findings.append(f"{operation.label}: {said(error)}\n{asked}")
    clear(daemon)
    assert not findings, "\n\n".join(findings)


def clear(daemon: Daemon) -> None:
    """Away with all that was made."""
    for kind in ("sandboxes", "snapshots"):
        for row in daemon.http.get(f"/v1/{kind}").json()[kind]:
            assert daemon.http.delete(f"/v1/{kind}/{row['id']}").is_success


def said(error: BaseException) -> str:
    """What was found, whether one thing or several."""
    if isinstance(error, BaseExceptionGroup):
        return "\n".join(said(one) for one in error.exceptions)
    return f"{type(error).__name__}: {error}"


def tame(case: Any, daemon: Daemon, living: dict[str, str]) -> None:
    """A living sandbox and process, an image and a path that are there, and short waits: where a
    value of that kind is asked for, and for every second one."""
    path, query = case.path_parameters or {}, case.query or {}
    if "sandbox_id" in path and case.method != "DELETE":
        if not daemon.http.get(f"/v1/sandboxes/{living['id']}").is_success:
            living["id"] = daemon.create("busybox")
        path["sandbox_id"] = living["id"]
        if "process_id" in path and len(path["process_id"]) % 2:
            url = f"/v1/sandboxes/{living['id']}/processes"
            answer = daemon.http.post(url, json={"command": ["cat"]})
            if answer.is_success:
                path["process_id"] = answer.json()["id"]
    if isinstance(case.body, dict):
        if case.path.endswith("/snapshots"):
            # 501 by name, on every node, which is no fault of the server's.
            case.body.pop("processes", None)
        if isinstance(case.body.get("image"), str) and len(case.body["image"]) % 2:
            case.body["image"] = "busybox"
        shorten(case.body)
    if case.path == "/v1/events" and query.get("follow") in (True, "true"):
        query["follow"] = False  # its answer has no end
    for name, value in query.items():
        if name in WAITS and is_long(value):
            query[name] = 0.2
        elif name == "path" and isinstance(value, str) and len(value) % 2:
            query[name] = f"/tmp/{value.replace(chr(0), '')}"


def shorten(body: dict[str, Any]) -> None:
    for name in WAITS:
        if is_long(body.get(name)):
            body[name] = 0.2


def is_long(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0.2
