"""The images that the workloads run in: Debian with the programs that rollouts use.

A few large ones, since building one takes a minute and starting a program in it nothing. They are
cached outside the repository, by what they are made of.
"""

from __future__ import annotations

from pathlib import Path

from tests.framework import images

_PYTHON = ("python3", "python-is-python3", "procps")
TOOLS = (
    *_PYTHON,
    *("gcc", "libc6-dev", "make", "gdb", "strace", "git", "tmux", "redis-server"),
    *("python3-pip", "python3-venv", "python3-wheel", "python3-pytest", "python3-pytest-xdist"),
)
LANGUAGES = (
    *_PYTHON,
    *("gcc", "libc6-dev", "nodejs", "default-jdk-headless", "golang-go", "rustc", "cargo"),
)
SERVERS = (*_PYTHON, "postgresql", "sqlite3")
BROWSER = (*_PYTHON, "chromium", "fonts-dejavu-core")


def tools() -> Path:
    return images.debian_image(TOOLS)


def languages() -> Path:
    return images.debian_image(LANGUAGES)


def servers() -> Path:
    return images.debian_image(SERVERS)


def browser() -> Path:
    return images.debian_image(BROWSER)
