"""What Apptainer looks for inside an image: `/.singularity.d` and the symlinks into it.

Without them `apptainer exec` starts, but the image's environment, `apptainer run` and a user's
`--env` are lost. Also the directories that sandboxes mount over, where an image lacks them. All
of it is one more layer on top, generated; what an image brings of its own under these names is
kept, but for the files that say what the OCI config says.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

from sif_tools.image_config import DEFAULT_PATH, ImageConfig
from sif_tools.merge.merger import Pass, Progress
from sif_tools.merge.tree import Directory, Tree
from sif_tools.tarstream.entry import Entry, EntryStream, Kind, Piece

_ROOT: Final = b".singularity.d"
# Names a shell can assign to; others are left out, as `export` would end the script there.
_SHELL_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

_SYMLINKS: Final = {
    b"singularity": b".singularity.d/runscript",
    b"environment": b".singularity.d/env/90-environment.sh",
    b".exec": b".singularity.d/actions/exec",
    b".run": b".singularity.d/actions/run",
    b".shell": b".singularity.d/actions/shell",
    b".test": b".singularity.d/actions/test",
}

_MOUNTPOINTS: Final = {b"proc": 0o755, b"sys": 0o755, b"dev": 0o755, b"run": 0o755, b"tmp": 0o1777}

_BASE_ENVIRONMENT: Final = f"""\
#!/bin/sh
# The last word on the environment: a PATH there must be.
if [ -z "${{PATH:-}}" ]; then
    PATH="{DEFAULT_PATH}"
fi
export PATH
"""

_LOAD_ENVIRONMENT: Final = """\
#!/bin/sh
for env_script in /.singularity.d/env/*.sh; do
    [ -f "$env_script" ] && . "$env_script"
done
unset env_script
"""

_ACTIONS: Final = {
    b"exec": 'exec "$@"\n',
    b"run": """\
[ -x /.singularity.d/runscript ] && exec /.singularity.d/runscript "$@"
echo "this image has no runscript" >&2
exit 1
""",
    b"shell": """\
for shell in "${SINGULARITY_SHELL:-}" /bin/bash /bin/sh; do
    [ -n "$shell" ] && [ -x "$shell" ] && exec "$shell" "$@"
done
echo "this image has no shell" >&2
exit 1
""",
    b"start": """\
[ -x /.singularity.d/startscript ] && exec /.singularity.d/startscript "$@"
exit 0
""",
    b"test": """\
[ -x /.singularity.d/test ] && exec /.singularity.d/test "$@"
exit 0
""",
}


def environment_script(config: ImageConfig) -> str:
    """The image's ENV for a shell to source: PATH is set, all else yields to what is set."""
    lines = ["#!/bin/sh"]
    for item in config.env:
        name, equals, value = item.partition("=")
        if not equals or not _SHELL_NAME.fullmatch(name):
            continue
        escaped = re.sub(r'([\\"$`])', r"\\\1", value)
        if name == "PATH":
            lines.append(f'export PATH="{escaped}"')
        else:
            lines.append(f'export {name}="${{{name}:-"{escaped}"}}"')
    return "\n".join(lines) + "\n"


def run_script(config: ImageConfig) -> str:
    """Entrypoint with the arguments given, or with the default command where there are none."""
    lines = ["#!/bin/sh"]
    if config.cmd:
        lines += ["if [ $# -eq 0 ]; then", f"    set -- {shlex.join(config.cmd)}", "fi"]
    if config.entrypoint:
        lines.append(f'exec {shlex.join(config.entrypoint)} "$@"')
    else:
        lines += ["if [ $# -eq 0 ]; then", "    set -- /bin/sh", "fi", 'exec "$@"']
    return "\n".join(lines) + "\n"


class SingularityLayer:
    """Implements `Layer`: the generated files, as the merged tree so far asks for them."""

    name = "the layer of generated files"
    has_whiteouts = False

    def __init__(
        self, tree: Tree, config: ImageConfig, labels: Mapping[str, str], *, config_decides: bool
    ) -> None:
        """`config_decides`: the config is the image's own, not only what we assume for it."""
        self._content: list[tuple[Entry, bytes]] = []
        for path, mode in _MOUNTPOINTS.items():
            if tree.find(path) is None:
                self._directory(path, mode)
        for below in (b"", b"/env", b"/actions"):
            if not isinstance(tree.find(_ROOT + below), Directory):
                self._directory(_ROOT + below, 0o755)
        said = {
            b"env/10-docker2singularity.sh": environment_script(config),
            b"labels.json": labels_json(labels),
        }
        assumed = {
            b"env/90-environment.sh": "#!/bin/sh\n",
            b"env/99-base.sh": _BASE_ENVIRONMENT,
            b"runscript": run_script(config),
            b"startscript": "#!/bin/sh\n",
        }
        assumed |= {b"actions/" + name: _LOAD_ENVIRONMENT + end for name, end in _ACTIONS.items()}
        for name, text in (said | assumed).items():
            if (config_decides and name in said) or tree.find(_ROOT + b"/" + name) is None:
                self._file(name, text)
        for path, target in _SYMLINKS.items():
            if tree.find(path) is None:
                self._content.append(
                    (Entry(path, Kind.SYMLINK, mode=0o777, link_target=target), b"")
                )

    @property
    def content(self) -> Sequence[tuple[Entry, bytes]]:
        """The entries in their order, each with its data."""
        return self._content

    @contextmanager
    def open(self, which: Pass, progress: Progress | None = None) -> Iterator[EntryStream]:
        del which, progress
        yield _Listed(self._content)

    def _directory(self, path: bytes, mode: int) -> None:
        self._content.append((Entry(path, Kind.DIRECTORY, mode=mode), b""))

    def _file(self, name: bytes, text: str) -> None:
        data = text.encode()
        mode = 0o644 if name.endswith(b".json") else 0o755
        entry = Entry(_ROOT + b"/" + name, Kind.FILE, mode=mode, size_bytes=len(data))
        self._content.append((entry, data))


def labels_json(labels: Mapping[str, str]) -> str:
    """Sorted, so that the same labels are the same bytes."""
    return json.dumps(dict(sorted(labels.items())), indent=1) + "\n"


class _Listed:
    """Entries in memory; implements `EntryStream`."""

    def __init__(self, content: list[tuple[Entry, bytes]]) -> None:
        self._content = content
        self._data = b""

    def __iter__(self) -> Iterator[Entry]:
        for entry, data in self._content:
            self._data = data
            yield entry

    def data(self) -> Iterable[Piece]:
        return [self._data]
