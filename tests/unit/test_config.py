"""Where settings come from, which wins, and what is refused."""

import os
import pwd
import resource
import stat
from dataclasses import fields
from pathlib import Path

import pytest

from sandboxd.config import Config, ensure_token, load_config, parse_listen
from sandboxd.errors import ConfigError
from sandboxd.model import KernelCaps, Limits


def test_flags_over_environment_over_file_over_defaults(tmp_path):
    path = tmp_path / "sandboxd.toml"
    path.write_text(
        'node_name = "file"\nmax_sandboxes = 1\nlog_level = "debug"\n'
        "[default_limits]\nmemory_mb = 64\n"
    )
    env = {
        "SANDBOXD_MAX_SANDBOXES": "2",
        "SANDBOXD_LOG_LEVEL": "warning",
        "SANDBOXD_MAX_LIMITS_MEMORY_MB": "128",
        "SANDBOXD_TOKEN": "for the client",
        "PATH": "/bin",
    }
    config = load_config(path, env, {"log_level": "error", "listen": None})
    assert (config.node_name, config.max_sandboxes, config.log_level) == ("file", 2, "error")
    assert config.default_limits == Limits(memory_mb=64)
    assert config.max_limits.memory_mb == 128
    assert config.listen == Config().listen
    assert config.origins == {
        "node_name": f"{path}:1",
        "max_sandboxes": "environment SANDBOXD_MAX_SANDBOXES",
        "log_level": "flag --log-level",
        "default_limits.memory_mb": f"{path}:5",
        "max_limits.memory_mb": "environment SANDBOXD_MAX_LIMITS_MEMORY_MB",
    }


def test_paths_follow_the_state_directory():
    config = load_config(env={"SANDBOXD_STATE_DIR": "/s", "SANDBOXD_RUNTIME_DIR": "/r"})
    assert (config.images_dir, config.token_file) == ("/s/images", "/s/token")
    assert config.launcher_socket == "/r/launcher.sock"
    assert config.node_name == os.uname().nodename


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("max_sandbox = 1", "max_sandbox"),
        ("[default_limits]\nmemory = 1", "default_limits.memory"),
        ("[limits]\nmemory_mb = 1", "limits"),
        ('max_sandboxes = "many"', "max_sandboxes"),
        ("max_sandboxes = 1.5", "max_sandboxes"),
        ("max_sandboxes = true", "max_sandboxes"),
        ("max_sandboxes = 0", "max_sandboxes"),
        ("hang_s = 0.5", "hang_s"),
        ("max_sandboxes = -1", "max_sandboxes"),
        ("image_idle_s = -1", "image_idle_s"),
        ("max_ttl_s = inf", "max_ttl_s"),
        ("max_ttl_s = nan", "max_ttl_s"),
        ("max_ttl_s = 10", "default_ttl_s"),
        ("default_timeout_s = 1e9", "default_timeout_s"),
        ("default_output_bytes = 99999999999", "default_output_bytes"),
        ("listen = 5", "listen"),
        ('listen = "nowhere"', "listen"),
        ('listen = "0.0.0.0:99999"', "listen"),
        ('state_dir = "relative"', "state_dir"),
        ('log_level = "loud"', "log_level"),
        ('cgroup_root = "a/b"', "cgroup_root"),
        ('image_backend = "loop"', "image_backend"),
        ('image_backend = "kernel"\nimage_copies_mb = 1', "image_copies_mb"),
        ('image_copies_dir = "relative"', "image_copies_dir"),
        ("image_read_ahead_mb = -1", "image_read_ahead_mb"),
        ("[default_limits]\nmemory_mb = 99999999", "default_limits.memory_mb"),
        ("[default_limits]\ncpus = 0", "default_limits.cpus"),
        ("[max_limits]\npids = -5", "max_limits.pids"),
    ],
)
def test_what_is_wrong_names_file_and_key(tmp_path, text, key):
    path = tmp_path / "sandboxd.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path, {})
    assert caught.value.detail["key"] == key
    assert key in caught.value.message
    assert caught.value.message.startswith(f"{path}:{text.count(chr(10)) + 1}: ") or (
        key == "limits"  # a table: its header's line
        and caught.value.message.startswith(f"{path}:1: ")
    )


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("# bogus = 1\n\nlog_level = 'info'\n  bogus = 1 # bogus", 4),
        ('node_name = """\nbogus = 1\n"""\nbogus = 1', 4),
        ("node_name = '''bogus = 1'''\n'bogus' = 1", 2),
        ('node_name = "[max_limits]"\n"bogus" = 1', 2),
        ("max_limits.pids = 5\nmax_limits . bogus = 1", 2),
        ("max_sandboxes = 5\n\n[ max_limits ] # bogus = 1\npids = 5\n\nbogus = 1\n", 6),
        ("log_level = 'info'\nmax_limits = { pids = 1, bogus = 1 }", 2),
    ],
)
def test_an_unknown_key_is_refused_with_its_line(tmp_path, text, line):
    path = tmp_path / "sandboxd.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=rf"{path}:{line}: unknown key '(max_limits\.)?bogus'"):
        load_config(path, {})


def test_the_file_that_is_no_toml_is_refused_with_the_line(tmp_path):
    path = tmp_path / "sandboxd.toml"
    path.write_text("max_sandboxes = 5\n\nlog_level = info\n")
    with pytest.raises(ConfigError, match="line 3"):
        load_config(path, {})


@pytest.mark.parametrize("content", [b"not toml", b"\xff\xfe", None])
def test_a_file_that_cannot_be_read_is_named(tmp_path, content):
    path = tmp_path / "sandboxd.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"sandboxd\.toml"):
        load_config(path, {})


def test_an_unknown_variable_or_flag_is_refused():
    with pytest.raises(ConfigError, match="SANDBOXD_MAX_SANDBOX"):
        load_config(env={"SANDBOXD_MAX_SANDBOX": "1"})
    with pytest.raises(ConfigError, match="--max-sandbox"):
        load_config(env={}, overrides={"max_sandbox": 1})


def test_listen():
    assert parse_listen("127.0.0.1:80") == ("127.0.0.1", 80)
    assert parse_listen("[::1]:80") == ("::1", 80)
    assert parse_listen("localhost:0") == ("localhost", 0)
    for bad in ("", ":80", "host", "host:", "host:x", "host:-1", "host:65536", "host:٣"):
        with pytest.raises(ValueError):
            parse_listen(bad)


def test_the_token_is_made_once_and_is_private(tmp_path):
    path = tmp_path / "token"
    old = os.umask(0)
    try:
        token = ensure_token(path)
    finally:
        os.umask(old)
    assert len(token) >= 32
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert ensure_token(path) == token
    assert os.listdir(tmp_path) == ["token"]
    assert ensure_token(tmp_path / "other") != token


@pytest.mark.parametrize("content", ["", "short", "with space in it, long enough", "ü" * 30])
def test_an_unusable_token_is_refused(tmp_path, content):
    path = tmp_path / "token"
    path.write_text(content)
    path.chmod(0o600)
    with pytest.raises(ConfigError):
        ensure_token(path)


def test_a_token_that_others_may_read_is_refused(tmp_path):
    path = tmp_path / "token"
    path.write_text("x" * 40)
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="owner only"):
        ensure_token(path)
    link = tmp_path / "link"
    path.chmod(0o600)
    link.symlink_to(path)
    with pytest.raises(ConfigError):
        ensure_token(link)
    with pytest.raises(ConfigError):
        ensure_token(tmp_path / "no" / "directory")


def test_the_sample_names_every_setting_with_its_default():
    sample = Path(__file__).parents[2] / "deploy/sandboxd.toml"
    assert load_config(sample, {}) == load_config(None, {})
    named = set(load_config(sample, {}).origins)
    tables = {"default_limits": Limits, "max_limits": Limits, "kernel_caps": KernelCaps}
    wanted = {field.name for field in fields(Config)} - tables.keys() - {"origins"}
    wanted |= {f"{name}.{field.name}" for name, kind in tables.items() for field in fields(kind)}
    assert named == wanted


@pytest.mark.parametrize(
    ("text", "expected"), [("true", True), ("false", False), ("False", False), ("TRUE", True)]
)
def test_a_switch_is_set_by_a_word(text: str, expected: bool) -> None:
    assert load_config(None, env={"SANDBOXD_PROC_VIEWS": text}).proc_views is expected


@pytest.mark.parametrize("text", ["0", "1", "yes", "off", ""])
def test_a_switch_takes_no_other_word(text: str) -> None:
    with pytest.raises(ConfigError, match="proc_views must be true or false"):
        load_config(None, env={"SANDBOXD_PROC_VIEWS": text})


def test_a_switch_in_a_file_is_a_boolean(tmp_path: Path) -> None:
    file = tmp_path / "sandboxd.toml"
    file.write_text("proc_views = false\n")
    assert load_config(file, env={}).proc_views is False
    file.write_text("proc_views = 0\n")
    with pytest.raises(ConfigError, match="must be true or false"):
        load_config(file, env={})


class TestOrdinaryUser:
    """Neither root nor the account that the service has."""

    @pytest.fixture(autouse=True)
    def user(self, monkeypatch):
        monkeypatch.setattr("os.geteuid", lambda: 77_001)
        monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, 4096))
        for name in ("XDG_RUNTIME_DIR", "XDG_STATE_HOME"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("HOME", "/home/ann")

    def test_his_files_are_where_he_may_write(self):
        config = load_config(env={})
        assert config.state_dir == "/home/ann/.local/state/sandboxd"
        assert config.runtime_dir == "/tmp/sandboxd-77001"
        assert config.token_file == f"{config.state_dir}/token"

    def test_as_the_base_directory_specification_has_it(self, monkeypatch):
        monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/77001")
        monkeypatch.setenv("XDG_STATE_HOME", "/data/state")
        config = load_config(env={})
        assert config.state_dir == "/data/state/sandboxd"
        assert config.runtime_dir == "/run/user/77001/sandboxd"

    def test_what_is_set_counts(self):
        config = load_config(env={"SANDBOXD_RUNTIME_DIR": "/x"}, overrides={"state_dir": "/y"})
        assert (config.runtime_dir, config.state_dir) == ("/x", "/y")

    def test_sandboxes_have_half_of_his_open_files(self):
        config = load_config(env={})
        assert config.default_limits.nofile == config.max_limits.nofile == 2048
        assert config.kernel_caps == Config().kernel_caps

    def test_more_open_files_than_he_has_are_refused(self):
        with pytest.raises(ConfigError, match=r"max_limits\.nofile is more than 2048"):
            load_config(env={"SANDBOXD_MAX_LIMITS_NOFILE": "4096"})

    def test_the_services_account_is_none(self, monkeypatch):
        account = pwd.getpwall()[-1]
        monkeypatch.setattr("os.geteuid", lambda: account.pw_uid)
        config = load_config(env={}, overrides={"user": account.pw_name})
        assert config.runtime_dir == Config().runtime_dir
