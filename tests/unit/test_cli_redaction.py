"""What is given away holds no secret that is known or called one, and is still of use."""

import json

import pytest

from sandboxd.cli.redaction import HIDDEN, redactor

TOKEN = 'tok"en\\0123456789'
SECRET = "s3cr3t-value_1"


@pytest.mark.parametrize(
    "text",
    [
        f"password={SECRET} next",
        f'{{"password": "{SECRET}", "a": 1}}',
        f"{{'db_password': '{SECRET} with words'}}",
        f"AWS_SECRET_ACCESS_KEY={SECRET}",
        f"HF_TOKEN: {SECRET}",
        f"token={SECRET}",
        f"?api_key={SECRET}&x=1",
        f"Authorization: Bearer {SECRET}",
        f'"authorization": "Basic {SECRET}"',
        f"curl -H 'bearer {SECRET}'",
        f"https://user:{SECRET}@host/path",
        f"Cookie: {SECRET}",
        json.dumps({"private_key": f'{SECRET}"quoted'}),
    ],
)
def test_what_is_called_a_secret_is_hidden(text):
    told = redactor([])(text)
    assert SECRET not in told
    assert HIDDEN in told


@pytest.mark.parametrize("quoted", [str, repr, json.dumps])
def test_the_token_is_hidden_in_any_quoting(quoted):
    told = redactor([TOKEN, ""])(f"x {quoted(TOKEN)} y")
    assert "0123456789" not in told
    assert told.startswith("x ")
    assert told.endswith(" y")


@pytest.mark.parametrize(
    "text",
    [
        '"token_file": {"value": "/var/lib/sandboxd/token", "origin": "default"}',
        "kebab token-unreadable: no",
        "sandboxd_create_seconds_bucket{le=\"0.5\",phase=\"total\"} 3.0",
        '{"kind": "failed", "code": "sandbox-dead"}',
        "https://host/path?x=1",
        "",
    ],
)  # fmt: skip
def test_what_is_none_is_left(text):
    assert redactor([])(text) == text


def test_json_stays_json():
    row = {"a": {"password": "x y", "n": [1, {"token": "z"}]}, "token_file": "/t", "secret": None}
    told = json.loads(redactor(["t" * 20])(json.dumps(row, indent=1)))
    assert told["a"] == {"password": HIDDEN, "n": [1, {"token": HIDDEN}]}
    assert told["token_file"] == "/t"
