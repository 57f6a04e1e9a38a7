"""PostgreSQL: processes that share memory and semaphores, signals between them, fsync, a crash."""

from __future__ import annotations

from tests.e2e.workloads.conftest import MakeMachine
from tests.e2e.workloads.machine import Machine

BIN = "/usr/lib/postgresql/15/bin"
START = f"{BIN}/pg_ctl -w -t 60 -D db -l log -o '-k /tmp' start"
QUERY = ["psql", "-h", "/tmp", "-d", "postgres", "-v", "ON_ERROR_STOP=1", "-Atqc"]


def start(box: Machine) -> None:
    box.run(f"{BIN}/initdb -D db --auth=trust --username=agent >/dev/null")
    box.run(START)


def test_a_server_is_started_asked_and_stopped(servers: MakeMachine) -> None:
    with servers("agent") as box:
        start(box)
        box.run([*QUERY, "create table t (id serial primary key, n int)"])
        box.run([*QUERY, "insert into t (n) select x * x from generate_series(1, 20000) x"])
        n = 20_000
        total = n * (n + 1) * (2 * n + 1) // 6
        assert box.run([*QUERY, "select count(*), sum(n::bigint) from t"]) == f"{n}|{total}\n"
        # By the loopback's address too; by workers, which share memory by /dev/shm.
        tcp = ["psql", "-h", "127.0.0.1", *QUERY[3:]]
        parallel = "set parallel_setup_cost = 0; set parallel_tuple_cost = 0;"
        parallel += "set min_parallel_table_scan_size = 0; set max_parallel_workers_per_gather = 2;"
        assert box.run([*tcp, f"{parallel} select sum(n::bigint) from t"]) == f"{total}\n"
        plan = box.run([*tcp, f"{parallel} explain analyze select sum(n::bigint) from t"])
        assert "Workers Launched: 2" in plan
        box.run(f"{BIN}/pg_ctl -w -D db -m fast stop")
        assert "database system is shut down" in box.run("cat log")


def test_what_was_committed_outlives_a_crash(servers: MakeMachine) -> None:
    with servers("agent") as box:
        start(box)
        box.run([*QUERY, "create table t (n int); insert into t values (42)"])
        box.run("kill -KILL $(head -1 db/postmaster.pid); rm -f /tmp/.s.PGSQL*")
        # Its children see that it is gone, and only then does another start.
        box.run("until ! pgrep -x postgres; do :; done >/dev/null")
        box.run(START)
        assert box.run([*QUERY, "select n from t"]) == "42\n"
        assert "automatic recovery in progress" in box.run("cat log")
        box.run(f"{BIN}/pg_ctl -w -D db -m immediate stop")


def test_debians_own_cluster_is_started_by_root(servers: MakeMachine) -> None:
    """The one the package made in the image, of the image's user `postgres`."""
    with servers("root") as box:
        box.run("pg_ctlcluster 15 main start")
        ask = ["runuser", "-u", "postgres", "--", "psql", "-Atqc", "select current_user, 6 * 7"]
        assert box.run(ask, cwd="/") == "postgres|42\n"
        box.run("runuser -u postgres -- pgbench -q -i -s 1", cwd="/")
        out = box.run("runuser -u postgres -- pgbench -c 4 -j 2 -t 50", cwd="/")
        assert "number of transactions actually processed: 200/200" in out
        box.run("pg_ctlcluster 15 main stop -m fast")
        assert "down" in box.run("pg_lsclusters -h")


def test_sqlite_locks_between_processes(servers: MakeMachine, user: str) -> None:
    with servers(user) as box:
        box.run("sqlite3 db 'pragma journal_mode=wal; create table t (n)' >/dev/null")
        insert = "sqlite3 -cmd '.timeout 60000' db 'insert into t values ('$n')'"
        box.run(f"for n in $(seq 40); do {insert} & pids+=($!); done; wait ${{pids[@]}}")
        assert box.run(["sqlite3", "db", "select count(*), sum(n) from t"]) == "40|820\n"
        assert box.run(["sqlite3", "db", "pragma integrity_check"]) == "ok\n"
