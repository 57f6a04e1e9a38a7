"""Node, Java, Go and Rust: compilers, their runtimes' threads, and how large they take the machine
to be."""

from __future__ import annotations

import hashlib
import json

import pytest

from tests.e2e.workloads.conftest import MakeMachine
from tests.e2e.workloads.machine import Machine

TEXT = "sandbox"
DIGEST = hashlib.sha256(TEXT.encode()).hexdigest()
SIZES = pytest.mark.parametrize("cpus", [1, 2])

NODE = """
const os = require('os'), http = require('http'), crypto = require('crypto');
const { Worker, isMainThread, parentPort } = require('worker_threads');
const { execFileSync } = require('child_process');
if (!isMainThread) {
    parentPort.postMessage(crypto.createHash('sha256').update('sandbox').digest('hex'));
} else {
    const server = http.createServer((request, answer) => {
        new Worker(__filename).on('message', text => answer.end(text));
    });
    server.listen(0, '127.0.0.1', async () => {
        const got = await fetch('http://127.0.0.1:' + server.address().port);
        console.log(JSON.stringify({
            digest: await got.text(), cpus: os.cpus().length, memory: os.totalmem(),
            child: execFileSync('echo', ['hello']).toString(),
        }));
        server.close();
    });
}
"""


@SIZES
def test_node(languages: MakeMachine, user: str, cpus: int) -> None:
    with languages(user, cpus=cpus) as box:
        box.put("app.js", NODE)
        found = json.loads(box.run(["node", "app.js"]))
        assert (found["digest"], found["child"]) == (DIGEST, "hello\n")
        assert found["cpus"] == cpus


JAVA = """
import java.net.URI;
import java.net.http.*;
import java.security.MessageDigest;
import java.util.*;
import java.util.stream.*;

public class App {
    public static void main(String[] args) throws Exception {
        byte[] digest = MessageDigest.getInstance("SHA-256").digest("sandbox".getBytes());
        System.out.println(HexFormat.of().formatHex(digest));
        System.out.println(IntStream.rangeClosed(1, 1000).parallel().mapToLong(n -> n * n).sum());
        System.out.println(Runtime.getRuntime().availableProcessors());
        System.out.println(Runtime.getRuntime().maxMemory() >> 20);
        var server = com.sun.net.httpserver.HttpServer.create(
            new java.net.InetSocketAddress("127.0.0.1", 0), 0);
        server.createContext("/", exchange -> {
            exchange.sendResponseHeaders(200, 2);
            exchange.getResponseBody().write("ok".getBytes());
            exchange.close();
        });
        server.start();
        var address = URI.create("http://127.0.0.1:" + server.getAddress().getPort() + "/");
        var answer = HttpClient.newHttpClient().send(
            HttpRequest.newBuilder(address).build(), HttpResponse.BodyHandlers.ofString());
        System.out.println(answer.body());
        System.exit(7);
    }
}
"""


def compiled_java(box: Machine) -> None:
    box.put("App.java", JAVA)
    box.run(["javac", "-d", "classes", "App.java"])


@SIZES
def test_java(languages: MakeMachine, user: str, cpus: int) -> None:
    with languages(user, cpus=cpus) as box:
        compiled_java(box)
        result = box.try_to(["java", "-cp", "classes", "App"])
        assert (result["exit_code"], result["stderr"]) == (7, ""), result
        digest, total, processors, _, body = result["stdout"].split()
        assert (digest, body) == (DIGEST, "ok")
        assert int(total) == sum(n * n for n in range(1, 1001))
        assert int(processors) == cpus


def test_a_jvm_is_told_its_memory(languages: MakeMachine) -> None:
    """Java's documented default is a quarter, `-XX:MaxRAMPercentage=25`."""
    with languages("agent", memory_mb=800) as box:
        compiled_java(box)
        result = box.try_to(["java", "-XX:MaxRAM=800m", "-cp", "classes", "App"])
        assert int(result["stdout"].split()[3]) == pytest.approx(200, rel=0.1)


def test_java_programs_see_their_limits(languages: MakeMachine) -> None:
    """The JVM's own classes, by which programs ask, read the files of cgroups."""
    with languages("agent", memory_mb=800, cpus=2) as box:
        told = box.try_to(["java", "-XshowSettings:system", "-version"])
        lines = {line.strip() for line in (told["stdout"] + told["stderr"]).splitlines()}
        assert {"Provider: cgroupv2", "Memory Limit: 800.00M", "CPU Quota: 200000us"} <= lines


@pytest.mark.xfail(
    strict=True,
    reason="the heap's size: HotSpot believes /sys/fs/cgroup only if statfs(2) says that it is one,"
    " and asks sysinfo(2) else, which no view reaches: the host's memory",
)
def test_a_jvm_finds_its_memory_by_itself(languages: MakeMachine) -> None:
    """A quarter of it is its heap (-XX:MaxRAMPercentage)."""
    with languages("agent", memory_mb=800) as box:
        compiled_java(box)
        heap_mb = int(box.try_to(["java", "-cp", "classes", "App"])["stdout"].split()[3])
        assert heap_mb == pytest.approx(200, rel=0.1)


def test_a_jvm_is_attached_to(languages: MakeMachine) -> None:
    """A JVM that talks to another: by a socket in /tmp, and a signal."""
    sleeper = "public class S { public static void main(String[] a) throws Exception {"
    sleeper += " System.out.println(1); System.out.flush(); Thread.sleep(600000); } }"
    with languages("agent") as box:
        box.put("S.java", sleeper)
        box.run("javac S.java; java S > said & echo $! > pid; until [ -s said ]; do :; done")
        out = box.run("jcmd S Thread.print; jcmd S VM.version; kill $(cat pid)")
        assert '"main" #1' in out
        assert "java.lang.Thread.sleep" in out


GO = """
package main

import (
    "crypto/sha256"
    "fmt"
    "io"
    "net"
    "net/http"
    "os/exec"
    "runtime"
    "sync"
)

func main() {
    fmt.Printf("%x\\n", sha256.Sum256([]byte("sandbox")))
    fmt.Println(runtime.NumCPU(), runtime.GOMAXPROCS(0))
    var wait sync.WaitGroup
    var lock sync.Mutex
    total := 0
    for n := 1; n <= 10000; n++ {
        wait.Add(1)
        go func(n int) { lock.Lock(); total += n; lock.Unlock(); wait.Done() }(n)
    }
    wait.Wait()
    fmt.Println(total)
    listener, _ := net.Listen("tcp", "127.0.0.1:0")
    go http.Serve(listener, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
        out, _ := exec.Command("echo", "-n", "ok").Output()
        w.Write(out)
    }))
    answer, _ := http.Get("http://" + listener.Addr().String())
    body, _ := io.ReadAll(answer.Body)
    fmt.Println(string(body))
}
"""
GO_TEST = """
package main

import "testing"

func TestRight(t *testing.T) {}
func TestWrong(t *testing.T) { t.Fatal("as it should") }
"""


@pytest.mark.parametrize(("user", "cpus"), [("root", 1), ("agent", 2)])
def test_go(languages: MakeMachine, user: str, cpus: int) -> None:
    with languages(user, cpus=cpus) as box:
        box.put("app/main.go", GO)
        box.put("app/main_test.go", GO_TEST)
        box.run("cd app; go mod init example.org/app; CGO_ENABLED=0 go build -o app .")
        out = box.run(["app/app"]).split()
        assert out == [DIGEST, str(cpus), str(cpus), str(sum(range(1, 10_001))), "ok"]
        result = box.try_to("cd app && go vet . && CGO_ENABLED=0 go test ./...")
        assert result["exit_code"] == 1
        assert "--- FAIL: TestWrong" in result["stdout"]
        assert "as it should" in result["stdout"]


def test_go_with_c(languages: MakeMachine) -> None:
    program = 'package main\n// int twice(int n) { return 2 * n; }\nimport "C"\n'
    program += 'import "fmt"\nfunc main() { fmt.Println(C.twice(21)) }\n'
    with languages("agent") as box:
        box.put("main.go", program)
        assert box.run(["go", "run", "main.go"]) == "42\n"


LIB_RS = """
use std::thread;
pub fn squares(most: u64) -> u64 {
    let part = move |k| (1..=most).filter(|n| n % 4 == k).map(|n| n * n).sum::<u64>();
    let threads: Vec<_> = (0..4).map(|k| thread::spawn(move || part(k))).collect();
    threads.into_iter().map(|thread| thread.join().unwrap()).sum()
}
#[test]
fn right() { assert_eq!(squares(3), 14); }
#[test]
#[should_panic(expected = "unwinds")]
fn panics() { if squares(1) == 1 { panic!("it unwinds") } }
"""
MAIN_RS = """
use lower::squares;
fn main() {
    println!("{}", squares(1000));
    println!("{}", std::thread::available_parallelism().unwrap());
    std::process::exit(9);
}
"""


@pytest.mark.parametrize(("user", "cpus"), [("root", 1), ("agent", 2)])
def test_rust(languages: MakeMachine, user: str, cpus: int) -> None:
    package = '[package]\nname = "{}"\nversion = "0.1.0"\nedition = "2021"\n[dependencies]\n'
    with languages(user, cpus=cpus) as box:
        box.put("lower/Cargo.toml", package.format("lower"))
        box.put("lower/src/lib.rs", LIB_RS)
        box.put("app/Cargo.toml", package.format("app") + 'lower = { path = "../lower" }\n')
        box.put("app/src/main.rs", MAIN_RS)
        box.run("cd app; cargo build --offline --release")
        result = box.try_to(["app/target/release/app"])
        assert result["exit_code"] == 9
        total = sum(n * n for n in range(1, 1001))
        assert result["stdout"].split() == [str(total), str(cpus)]
        assert "test result: ok. 2 passed" in box.run("cd lower; cargo test --offline")
