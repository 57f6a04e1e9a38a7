"""The table of sandboxes when things go wrong around it: the launcher, PID 1, images, time."""

import asyncio
import contextlib
import os
import threading

import pytest

from sandboxd.config import load_config
from sandboxd.errors import (
    ImageUnavailable,
    NodeUnavailable,
    NodeVersionMismatch,
    OomKilled,
    RequestError,
    SandboxDead,
    SandboxLost,
    SandboxNotFound,
)
from sandboxd.init.fingerprint import fingerprint as fingerprint_of_init
from sandboxd.launcher.client import LauncherClient, error_from_launcher
from sandboxd.model import ExecRequest, Limits, SandboxSpec, SandboxState
from sandboxd.runtime import adoption, expiry, manager
from sandboxd.runtime.idempotency import fingerprint
from sandboxd.runtime.ids import new_id
from sandboxd.runtime.manager import Runtime
from sandboxd.runtime.sandbox import Sandbox
from tests.unit.fakes_launcher import FakeLauncher, default_store

SPEC = SandboxSpec(image="debian")


class World:
    def __init__(self, tmp_path):
        (tmp_path / "root").mkdir()
        self.config = load_config(
            env={}, overrides={"state_dir": str(tmp_path), "runtime_dir": str(tmp_path)}
        )
        self.launcher = FakeLauncher(self.config.launcher_socket, tmp_path / "root")

    @contextlib.asynccontextmanager
    async def runtime(self):
        runtime = Runtime(self.config, LauncherClient(self.config.launcher_socket), default_store())
        await runtime.start()
        try:
            await until(lambda: runtime.ready)
            yield runtime
        finally:
            await runtime.close()


async def until(condition):
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.002)


@pytest.fixture
def world(tmp_path):
    before = sorted(os.listdir("/proc/self/fd"))
    threads = threading.active_count()
    world = World(tmp_path)
    yield world
    world.launcher.close()
    assert threading.active_count() <= threads + 40  # the default executor's stay
    assert sorted(os.listdir("/proc/self/fd")) == before


async def run(sandbox, *command, **fields):
    return await sandbox.start_exec(ExecRequest(command=command, **fields)).done


def test_a_restarted_daemon_has_everything_again(world):
    spec = SandboxSpec(
        image="debian", run="r", env={"A": "1"}, labels={"x": "y"}, limits=Limits(pids=99)
    )

    async def first():
        async with world.runtime() as runtime:
            views = [await runtime.create(spec, f"key-{n}") for n in range(7)]
            await runtime.delete(views[0].id)
            return views

    async def second(views):
        async with world.runtime() as runtime:
            adopted = list(runtime.sandboxes())
            assert [one.id for one in adopted] == sorted(view.id for view in views[1:])
            assert all(one.spec == spec and one.state == SandboxState.RUNNING for one in adopted)
            again = runtime.find(views[1].id)
            assert again.created_at == views[1].created_at
            assert (again.user, again.workdir) == ("0", "/work")
            result = await run(again, "/usr/bin/env")
            assert b"A=1\n" in result.stdout.data
            # The same key still means the same sandbox.
            replay = await runtime.create(spec, "key-3")
            assert replay.id == views[3].id
            assert len(world.launcher.rows) == 6
            [mount] = runtime.images.mounted()
            assert mount.users == 6

    views = asyncio.run(first())
    assert len(world.launcher.rows) == 6
    asyncio.run(second(views))


def test_a_sandbox_without_a_record_is_deleted(world):
    async def main():
        async with world.runtime() as runtime:
            for _ in range(2):
                await runtime.create(SPEC)
        ids = sorted(world.launcher.rows)
        world.launcher.rows[ids[0]]["meta"] = {"version": 99}
        async with world.runtime() as runtime:
            assert [one.id for one in runtime.sandboxes()] == [ids[1]]
            await until(lambda: list(world.launcher.rows) == [ids[1]])

    asyncio.run(main())


def test_a_launcher_that_is_gone_and_comes_back_empty(world):
    async def main():
        async with world.runtime() as runtime:
            view = await runtime.create(SPEC)
            waiting = runtime.find(view.id).start_exec(ExecRequest(command=("/bin/sleep", "60")))
            world.launcher.stop()
            world.launcher.kill_pid1(view.id)
            world.launcher.rows.clear()
            world.launcher.mounted.clear()
            with pytest.raises(SandboxLost):
                await waiting.done
            await until(lambda: not runtime.ready)
            with pytest.raises(NodeUnavailable):
                await runtime.create(SPEC)
            # What is known is still shown.
            assert runtime.find(view.id).state is SandboxState.FAILED
            world.launcher.restart()
            await until(lambda: runtime.ready)
            with pytest.raises(SandboxLost):
                runtime.find(view.id).control()
            # Images are mounted again for whoever comes next.
            assert (await runtime.create(SPEC)).state is SandboxState.RUNNING
            assert world.launcher.mounted == {"key-debian": "debian"}
            await runtime.delete(view.id)
            with pytest.raises(SandboxNotFound):
                runtime.find(view.id)

    asyncio.run(main())


def test_a_lost_connection_alone_loses_no_sandbox(world):
    async def main():
        async with world.runtime() as runtime:
            view = await runtime.create(SPEC)
            world.launcher.stop()
            await until(lambda: not runtime.ready)
            # The way to PID 1 does not go through the launcher.
            assert (await run(runtime.find(view.id), "/bin/true")).exit_code == 0
            with pytest.raises(NodeUnavailable):
                await runtime.delete(view.id)
            world.launcher.restart()
            await until(lambda: runtime.ready)
            # The deletion that failed is done by itself.
            await until(lambda: not world.launcher.rows)
            await until(lambda: not list(runtime.sandboxes()))

    asyncio.run(main())


def test_a_create_cut_off_by_the_launcher_leaves_nothing(world):
    async def main():
        async with world.runtime() as runtime:
            world.launcher.held.add("create")
            creating = asyncio.create_task(runtime.create(SPEC, "key"))
            await until(lambda: any(one["verb"] == "create" for one in world.launcher.seen))
            world.launcher.stop()
            with pytest.raises(NodeUnavailable):
                await creating
            # It made the sandbox all the same, before it saw that nobody listens.
            world.launcher.release("create")
            assert len(world.launcher.rows) == 1
            world.launcher.restart()
            await until(lambda: runtime.ready)
            await until(lambda: not world.launcher.rows)
            await until(lambda: list(runtime.sandboxes()) == [])
            assert (await runtime.create(SPEC, "key")).state is SandboxState.RUNNING

    asyncio.run(main())


def test_one_that_was_not_finished_is_not_taken_over(world):
    """A daemon was killed between the making of a sandbox and the files it was asked for with."""

    async def first():
        async with world.runtime() as runtime:
            return [await runtime.create(SPEC, f"key-{n}") for n in range(2)]

    async def second(views):
        async with world.runtime() as runtime:
            assert [one.id for one in runtime.sandboxes()] == [views[1].id]
            await until(lambda: list(world.launcher.rows) == [views[1].id])
            # Its key is free: whoever asks again gets one that is whole.
            assert (await runtime.create(SPEC, "key-0")).id != views[0].id

    views = asyncio.run(first())
    world.launcher.rows[views[0].id]["meta"]["finished"] = False
    asyncio.run(second(views))


def test_one_whose_pid_1_is_slow_keeps_nobody_waiting(world, monkeypatch):
    monkeypatch.setattr(adoption, "ATTACH_WAIT_S", 0.05)
    monkeypatch.setattr(adoption, "ATTACH_AGAIN_S", 0.01)

    async def first():
        async with world.runtime() as runtime:
            return [await runtime.create(SPEC, f"key-{n}") for n in range(2)]

    async def second(views):
        slow, well = sorted(view.id for view in views)
        starved = {"code": "node-error", "message": "attach took too long"}
        world.launcher.fail["attach"] = [starved, starved]  # each, once ...
        world.launcher.held.add("attach")  # ... and all wait at first
        async with world.runtime() as runtime:  # it is ready all the same
            for one in (slow, well):
                assert runtime.find(one).state is SandboxState.CREATING
                with pytest.raises(NodeUnavailable):
                    runtime.find(one).control()
            await runtime.create(SPEC)
            # A key means the same as ever.
            assert (await runtime.create(SPEC, "key-0")).id == views[0].id
            # One that is deleted meanwhile stays deleted, and no descriptor of it is kept.
            await runtime.delete(well)
            world.launcher.release("attach")
            await until(lambda: runtime.find(slow).state is SandboxState.RUNNING)
            assert (await run(runtime.find(slow), "/bin/echo", "x")).exit_code == 0
            with pytest.raises(SandboxNotFound):
                runtime.find(well)

    asyncio.run(second(asyncio.run(first())))


def test_what_was_paused_half_way_is_paused(world):
    async def first():
        async with world.runtime() as runtime:
            return await runtime.create(SPEC)

    async def second(view):
        async with world.runtime() as runtime:
            assert runtime.find(view.id).state is SandboxState.PAUSED
            assert world.launcher.frozen == {view.id: True}

    view = asyncio.run(first())
    world.launcher.rows[view.id]["meta"]["paused"] = True  # noted, and not done yet
    asyncio.run(second(view))


@pytest.mark.parametrize(
    ("reason", "kind"),
    [("exited", SandboxDead), ("image-lost", SandboxLost), ("oom-killed", OomKilled)],
)
def test_death_is_told_with_its_reason(world, reason, kind):
    async def main():
        async with world.runtime() as runtime:
            view = await runtime.create(SPEC)
            sandbox = runtime.find(view.id)
            waiting = sandbox.start_exec(ExecRequest(command=("/bin/sleep", "60")))
            # The end of the socket comes first, why a little later.
            world.launcher.kill_pid1(view.id)
            world.launcher.event({"event": "sandbox-died", "sandbox": view.id, "reason": reason})
            with pytest.raises(kind) as caught:
                await waiting.done
            assert caught.value.detail["reason"] == reason
            with pytest.raises(kind):
                sandbox.control()
            assert sandbox.state is SandboxState.FAILED
            await runtime.delete(view.id)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("row", "kind", "reason"),
    [
        ({"state": "running"}, SandboxDead, "exited"),  # PID 1 lives, and has cut us off
        ({"state": "failed", "reason": "oom-killed"}, OomKilled, "oom-killed"),
        ({"state": "failed", "reason": "node-lost"}, SandboxLost, "node-lost"),
        (None, SandboxLost, "node-lost"),  # the launcher is the successor of another
    ],
)
def test_death_that_the_launcher_did_not_tell_of_is_asked_for(
    world, monkeypatch, row, kind, reason
):
    monkeypatch.setattr(manager, "REASON_WAIT_S", 0.01)

    async def main():
        async with world.runtime() as runtime:
            view = await runtime.create(SPEC)
            if row is None:
                world.launcher.rows.clear()
            else:
                world.launcher.rows[view.id] |= row
            world.launcher.kill_pid1(view.id)
            await until(lambda: runtime.find(view.id).state is SandboxState.FAILED)
            failure = runtime.find(view.id).failure
            assert (type(failure), failure.detail["reason"]) == (kind, reason)

    asyncio.run(main())


def test_death_while_the_launcher_does_not_answer_is_the_nodes(world, monkeypatch):
    monkeypatch.setattr(manager, "REASON_WAIT_S", 0.01)
    monkeypatch.setattr(manager, "REASON_ANSWER_S", 0.05)
    world.launcher.held.add("state")

    async def main():
        async with world.runtime() as runtime:
            view = await runtime.create(SPEC)
            world.launcher.kill_pid1(view.id)
            await until(lambda: runtime.find(view.id).state is SandboxState.FAILED)
            failure = runtime.find(view.id).failure
            assert (failure.code, failure.cause, failure.retryable) == (
                "sandbox-lost", "node", True,
            )  # fmt: skip

    asyncio.run(main())


def test_what_runs_in_the_background_ends_with_the_launcher(world):
    """Whose word on its end would never come."""

    async def main():
        async with world.runtime() as runtime:
            view = await runtime.create(SPEC)
            table = runtime.processes.of(runtime.find(view.id))
            process = await table.start(ExecRequest(command=("/bin/sleep", "60")))
            waiting = asyncio.ensure_future(process.wait({}, 3600))
            await asyncio.sleep(0)
            world.launcher.stop()
            world.launcher.kill_pid1(view.id)
            async with asyncio.timeout(10):
                await waiting
            assert process.exit.failure.code == "sandbox-lost"
            assert (process.exit.exit_code, runtime.find(view.id).background) == (None, 0)
            world.launcher.restart()

    asyncio.run(main())


def test_time_up_deletes(world):
    async def main():
        async with world.runtime() as runtime:
            await runtime.create(SandboxSpec(image="debian", ttl_s=0.05))
            keep = await runtime.create(SPEC)
            await until(lambda: list(world.launcher.rows) == [keep.id])
            # The launcher's table comes first: its answer is still on the way to the daemon's.
            await until(lambda: [one.id for one in runtime.sandboxes()] == [keep.id])

    asyncio.run(main())


def test_time_goes_on_while_no_daemon_runs(world):
    async def main():
        async with world.runtime() as runtime:
            view = await runtime.create(SandboxSpec(image="debian", ttl_s=1000))
        world.launcher.rows[view.id]["meta"]["created_at"] -= 2000
        async with world.runtime() as runtime:
            await until(lambda: not world.launcher.rows)
            assert list(runtime.sandboxes()) == []

    asyncio.run(main())


def test_deleting_at_once_is_one_deletion(world):
    async def main():
        async with world.runtime() as runtime:
            view = await runtime.create(SPEC)
            waiting = runtime.find(view.id).start_exec(ExecRequest(command=("/bin/sleep", "60")))
            await asyncio.gather(*(runtime.delete(view.id) for _ in range(5)))
            with pytest.raises(SandboxDead):
                await waiting.done
        assert [one["verb"] for one in world.launcher.seen].count("delete") == 1

    asyncio.run(main())


def test_deleting_while_it_is_made(world):
    async def main():
        async with world.runtime() as runtime:
            world.launcher.held.add("create")
            creating = asyncio.create_task(runtime.create(SPEC))
            await until(lambda: list(runtime.sandboxes()))
            [sandbox] = runtime.sandboxes()
            with pytest.raises(NodeUnavailable):
                sandbox.control()
            deleting = asyncio.create_task(runtime.delete(sandbox.id))
            await until(lambda: any(one["verb"] == "create" for one in world.launcher.seen))
            world.launcher.release("create")
            await asyncio.gather(creating, deleting)
            assert not world.launcher.rows

    asyncio.run(main())


def test_the_same_key_at_once_makes_one_sandbox(world):
    async def main():
        async with world.runtime() as runtime:
            views = await asyncio.gather(*(runtime.create(SPEC, "key") for _ in range(10)))
            assert len({view.id for view in views}) == 1
            assert len(world.launcher.rows) == 1

    asyncio.run(main())


def test_an_image_is_mounted_once_for_all_who_ask(world):
    async def main():
        async with world.runtime() as runtime:
            world.launcher.held.add("mount")
            creating = [asyncio.create_task(runtime.create(SPEC)) for _ in range(8)]
            await until(lambda: any(one["verb"] == "mount" for one in world.launcher.seen))
            # Whoever asked first may go: the others still get their mount.
            creating[0].cancel()
            await asyncio.sleep(0)
            world.launcher.release("mount")
            await asyncio.gather(*creating[1:])
            assert [one["verb"] for one in world.launcher.seen].count("mount") == 1
            [mount] = runtime.images.mounted()
            assert mount.users == 7

    asyncio.run(main())


def test_a_failed_mount_fails_all_who_wait_and_is_tried_again(world):
    async def main():
        async with world.runtime() as runtime:
            world.launcher.fail["mount"] = [{"code": "image-unavailable", "message": "no"}]
            results = await asyncio.gather(
                *(runtime.create(SPEC) for _ in range(3)), return_exceptions=True
            )
            assert [type(one) for one in results] == [ImageUnavailable] * 3
            assert (await runtime.create(SPEC)).state is SandboxState.RUNNING

    asyncio.run(main())


def test_an_idle_image_is_unmounted_and_comes_back(world):
    async def main():
        async with world.runtime() as runtime:
            view = await runtime.create(SPEC)
            runtime.images.idle_s = 0
            runtime.images.evict_idle()
            assert world.launcher.mounted
            await runtime.delete(view.id)
            # The launcher may know a user that we do not: then it stays.
            world.launcher.fail["unmount"] = [{"code": "image-in-use", "message": "used"}]
            runtime.images.evict_idle()
            await until(runtime.images.mounted)
            assert world.launcher.mounted
            world.launcher.held.add("unmount")
            runtime.images.evict_idle()
            await until(lambda: world.launcher.seen[-1]["verb"] == "unmount")
            creating = asyncio.create_task(runtime.create(SPEC))
            await asyncio.sleep(0.01)
            world.launcher.release("unmount")
            assert (await creating).state is SandboxState.RUNNING
            assert world.launcher.mounted

    asyncio.run(main())


def test_an_image_whose_server_died_is_mounted_again(world):
    async def main():
        async with world.runtime() as runtime:
            view = await runtime.create(SPEC)
            world.launcher.event({"event": "image-died", "key": "key-debian"})
            await until(lambda: not runtime.images.mounted())
            await runtime.create(SPEC)
            assert [one["verb"] for one in world.launcher.seen].count("mount") == 2
            # The old share is of the dead mount.
            await runtime.delete(view.id)
            [mount] = runtime.images.mounted()
            assert mount.users == 1

    asyncio.run(main())


def test_a_launcher_of_another_version_is_not_used(world):
    world.launcher.do_hello = lambda *_: {"ok": {"version": 999}}

    async def main():
        runtime = Runtime(
            world.config, LauncherClient(world.config.launcher_socket), default_store()
        )
        await runtime.start()
        await until(lambda: [one["verb"] for one in world.launcher.seen].count("hello") > 2)
        assert not runtime.ready
        await runtime.close()

    asyncio.run(main())


def test_errors_of_the_launcher_keep_their_class():
    error = error_from_launcher(
        {"code": "sandbox-setup-failed", "message": "m", "hint": "h", "detail": {"step": "proc"}}
    )
    assert (error.code, error.message, error.hint) == ("sandbox-setup-failed", "m", "h")
    assert error.detail == {"step": "proc"}
    strange = error_from_launcher({"code": "new-code", "detail": {"message": 1, "self": 2}})
    assert (strange.code, strange.detail) == ("node-error", {"launcher_code": "new-code"})
    assert error_from_launcher(None).code == "node-error"
    assert error_from_launcher({"code": "internal-error"}).code == "node-error"


def test_expiry_fires_in_order_whatever_the_order_of_adding():
    async def main():
        due = []
        wheel = expiry.Expiry(due.append)
        for name, delay in (("c", 0.03), ("a", 0.01), ("b", 0.02), ("z", 50), ("now", -1)):
            wheel.add(name, delay)
        await until(lambda: len(due) == 4)
        assert due == ["now", "a", "b", "c"]
        wheel.close()

    asyncio.run(main())


def test_ids_are_random_and_names():
    ids = {new_id() for _ in range(1000)}
    assert len(ids) == 1000
    assert all(len(one) == 29 and one.islower() and one[3:].isalnum() for one in ids)


def test_meta_gives_the_same_record_back():
    async def main():
        spec = SandboxSpec(image="a/b", env={"ü": "ß=="}, labels={"k": "v"}, ttl_s=5.5, user="x:y")
        one = Sandbox(id="sb-1", spec=spec, created_at=1.5)
        one.set_image("key", default_store().images["debian"])
        other = Sandbox.from_meta("sb-1", one.meta())
        assert other.view() == one.view().__class__(
            **{name: getattr(one.view(), name) for name in one.view().__slots__}
        )
        assert fingerprint(other.spec) == fingerprint(spec)
        assert fingerprint(SPEC) != fingerprint(spec)
        for broken in ({}, {"version": 1}, {"version": 2}):
            with pytest.raises((KeyError, ValueError, TypeError)):
                Sandbox.from_meta("sb-1", broken)

    asyncio.run(main())


def test_too_much_metadata_is_refused_before_the_launcher_is_asked(world):
    async def main():
        async with world.runtime() as runtime:
            with pytest.raises(RequestError):
                await runtime.create(SandboxSpec(image="debian", env={"A": "x" * 20_000}))
            assert list(runtime.sandboxes()) == []
        assert "create" not in [one["verb"] for one in world.launcher.seen]

    asyncio.run(main())


def test_a_node_of_another_version_is_named(world):
    """After an upgrade of the daemon alone: it could not speak to the PID 1s that are there."""
    world.launcher.init = "0123456789abcdef"

    async def main():
        client = LauncherClient(world.config.launcher_socket)
        runtime = Runtime(world.config, client, default_store())
        await runtime.start()
        try:
            await until(lambda: client.refused)
            assert not runtime.ready
            for ask in (lambda: runtime.find("sb-x"), runtime.sandboxes):
                with pytest.raises(NodeVersionMismatch, match="0123456789abcdef"):
                    ask()
            with pytest.raises(NodeVersionMismatch) as caught:
                await runtime.create(SPEC)
            assert not caught.value.retryable
            # Once the node was restarted, all is well by itself.
            world.launcher.init = fingerprint_of_init()
            await until(lambda: runtime.ready)
            await runtime.create(SPEC)
        finally:
            await runtime.close()

    asyncio.run(main())
