"""pip, venv and pytest -n, without a network: from a directory of wheels."""

from __future__ import annotations

import re

import pytest

from tests.e2e.workloads.conftest import MakeMachine
from tests.e2e.workloads.machine import Machine

pytestmark = pytest.mark.e2e

SETUP = """
from setuptools import Extension, setup
setup(
    name="{name}", version="{version}", packages=["{name}"], install_requires={needs},
    entry_points={{"console_scripts": ["say-{name}={name}:main"]}},
)
"""


def make_wheel(box: Machine, name: str, version: str, source: str, needs: list[str]) -> None:
    """A wheel in ~/wheels, built in the sandbox by setuptools."""
    box.put(f"{name}/setup.py", SETUP.format(name=name, version=version, needs=needs))
    box.put(f"{name}/{name}/__init__.py", source)
    box.run(f"pip wheel --no-index --no-build-isolation --no-deps -w wheels ./{name}")


def make_wheels(box: Machine) -> None:
    make_wheel(box, "lower", "1.2", "def double(n):\n    return 2 * n\n", [])
    upper = "from lower import double\ndef main():\n    print(double(21))\n"
    make_wheel(box, "upper", "3.4", upper, ["lower>=1"])


def test_pip_installs_into_a_virtual_environment(tools: MakeMachine) -> None:
    with tools("agent") as box:
        make_wheels(box)
        box.run("python3 -m venv env; env/bin/pip install --no-index --find-links wheels upper")
        assert box.run(["env/bin/say-upper"]) == "42\n"
        assert "lower==1.2\nupper==3.4\n" in box.run("env/bin/pip freeze")
        box.run("env/bin/pip uninstall -y lower")
        gone = box.try_to(["env/bin/say-upper"])
        assert "No module named 'lower'" in gone["stderr"]


def test_pip_installs_for_all_and_for_one_user(tools: MakeMachine, user: str) -> None:
    with tools(user) as box:
        make_wheels(box)
        where = "" if user == "root" else "--user"
        pip = f"pip install --break-system-packages --no-index --find-links wheels {where} upper"
        box.run(pip)
        script = (
            "/usr/local/bin/say-upper" if user == "root" else f"{box.home}/.local/bin/say-upper"
        )
        assert box.run([script]) == "42\n"


def test_pip_installs_an_editable_checkout(tools: MakeMachine) -> None:
    with tools("agent") as box:
        make_wheel(box, "lower", "1.2", "def double(n):\n    return 2 * n\n", [])
        box.run("python3 -m venv --system-site-packages env")
        box.run("env/bin/pip install --no-index --no-build-isolation -e ./lower")
        use = ["env/bin/python", "-c", "import lower; print(lower.double(4))"]
        assert box.run(use) == "8\n"
        box.put("lower/lower/__init__.py", "def double(n):\n    return n + n + 1\n")
        assert box.run(use) == "9\n"


TESTS = """
import os, pytest, time
@pytest.mark.parametrize("n", range(24))
def test_square(n, tmp_path):
    (tmp_path / "x").write_text(str(n * n))
    assert int((tmp_path / "x").read_text()) == n * n
def test_wrong():
    assert 6 * 7 == 41
"""


@pytest.mark.parametrize("workers", ["4", "auto"])
def test_pytest_n(tools: MakeMachine, user: str, workers: str) -> None:
    with tools(user) as box:
        box.put("test_it.py", TESTS)
        result = box.try_to(["python3", "-m", "pytest", "-n", workers, "test_it.py"])
        assert result["exit_code"] == 1, result
        assert "1 failed, 24 passed" in result["stdout"]
        assert "assert (6 * 7) == 41" in result["stdout"]


def test_multiprocessing_by_each_way(tools: MakeMachine, user: str) -> None:
    """POSIX semaphores and shared memory, and sockets with descriptors in them."""
    program = """
import multiprocessing as mp
from multiprocessing.shared_memory import SharedMemory
def square(n):
    return n * n
if __name__ == "__main__":
    for way in ("fork", "spawn", "forkserver"):
        with mp.get_context(way).Pool(3) as pool:
            print(way, sum(pool.map(square, range(10))))
    memory = SharedMemory(create=True, size=4096)
    memory.buf[:3] = b"abc"
    other = SharedMemory(memory.name)
    print(bytes(other.buf[:3]))
    other.close()
    memory.close()
    memory.unlink()
"""
    with tools(user) as box:
        box.put("many.py", program)
        total = sum(n * n for n in range(10))
        expected = [f"{way} {total}" for way in ("fork", "spawn", "forkserver")]
        assert box.run(["python3", "many.py"]).splitlines() == [*expected, "b'abc'"]


@pytest.mark.parametrize(("cpus", "count"), [(1, 1), (2, 2)])
def test_programs_size_themselves_by_the_limits(tools: MakeMachine, cpus: int, count: int) -> None:
    with tools("agent", cpus=cpus, memory_mb=300) as box:
        assert box.run("nproc").strip() == str(count)
        assert box.run(["python3", "-c", "import os; print(os.cpu_count())"]) == f"{count}\n"
        assert re.search(r"^Mem: +300 ", box.run("free -m"), re.MULTILINE)
        box.put("test_it.py", TESTS)
        out = box.try_to("python3 -m pytest -n auto test_it.py")["stdout"]
        assert len(set(re.findall(r"gw\d+ \[25\]", out))) == count, out
