"""Hatchling's custom build hook: compiles the C parts and puts them into the wheel.

For: hatchling, for wheels and editable installations alike; in both the binary is
`sandboxd/init/sandbox_init` beside this file. Not for: compiling by hand (`scripts/build-init`) or
in tests; the compiler call itself is in `build.py`.
"""

from __future__ import annotations

import importlib.util
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ARTIFACTS = ("sandboxd/init/sandbox_init", "sandboxd/init/squashfuse_keep.so")


class InitBuildHook(BuildHookInterface[Any]):
    """Runs before hatchling collects the files of a wheel."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, then declare what git ignores an artifact of a platform wheel.

        `version` is "standard" or "editable"; an editable installation finds the binary in place.
        """
        _compile(*(Path(self.root) / name for name in ARTIFACTS))
        build_data["artifacts"] += ARTIFACTS
        # A static program depends on the machine but on no Python version.
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"


def _compile(program: Path, library: Path) -> None:
    # By path: under build isolation neither this package nor its folder is importable.
    source = Path(__file__).with_name("build.py")
    spec = importlib.util.spec_from_file_location("sandboxd_init_build", source)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load {source}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.build(program)
    module.build_preload(library)
