"""The daemon's log, on stderr: text for people, or JSON (``log_lines``) for programs.

No secret is in it: what is told of a request is its error's words, never a body, a header or an
environment; the daemon's own token is taken out of whatever a library might say; and of libraries
only what is worth a person's time is told, since their debug lines quote headers and frames.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from sandboxd.config import Config
from sandboxd.log_lines import common_fields, moment

HIDDEN: Final = "[token]"
_ABOUT: Final = ("sandbox", "run", "snapshot", "image")
"""What ``extra`` of a record may say that it is about."""
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


def configure(config: Config, token: str, environment: Mapping[str, str]) -> None:
    """Send all that is logged to stderr, in ``config.log_format``."""
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(_worth_telling)
    handler.setFormatter(
        json_formatter(token, common_fields(config.node_name, environment))
        if config.log_format == "json"
        else _Text(token)
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(config.log_level.upper())
    logging.captureWarnings(True)  # they have lines of their own else


def _worth_telling(record: logging.LogRecord) -> bool:
    if record.name.partition(".")[0] in ("sandboxd", "sif_tools"):
        return True
    # uvicorn tells of every WebSocket, with its query, in which there may be a secret.
    return record.levelno >= logging.INFO and "WebSocket %s" not in str(record.msg)


class _Text(logging.Formatter):
    def __init__(self, token: str) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")
        self._hide = hiding(token)

    def formatMessage(self, record: logging.LogRecord) -> str:
        # What is quoted in it may come from a sandbox: it stays on its line, and is no escape
        # sequence of the terminal. A traceback follows this, and has its lines.
        record.message = _CONTROL.sub(lambda found: repr(found.group())[1:-1], record.message)
        return super().formatMessage(record)

    def format(self, record: logging.LogRecord) -> str:
        return self._hide(super().format(record))


def hiding(token: str) -> Callable[[str], str]:
    """Takes the token out of a text, quoted ones too."""
    forms = sorted({token, repr(token)[1:-1], json.dumps(token)[1:-1]}, key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, forms)))
    return lambda text: pattern.sub(HIDDEN, text)


def json_formatter(token: str, fields: Mapping[str, str]) -> logging.Formatter:
    """Of records of ``logging``, whoever made them."""
    hide = hiding(token)

    def shape(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
        record = event.pop("_record")
        event.pop("_from_structlog")
        row: dict[str, Any] = {
            "at": moment(record.created),
            "level": record.levelname.lower(),
            "part": "api",
            "logger": record.name,
            "message": event.pop("event"),
            **fields,
            **event,
        }
        return {key: hide(value) if isinstance(value, str) else value for key, value in row.items()}

    processors: list[Processor] = [
        structlog.stdlib.ExtraAdder(allow=_ABOUT),
        structlog.processors.format_exc_info,
        shape,
        structlog.processors.JSONRenderer(),
    ]
    return structlog.stdlib.ProcessorFormatter(processors=processors)
