"""What passes of a head between a client and a program in a sandbox."""

import pytest

from sandboxd.api.ports.headers import request_head, response_head

PREFIX = b"/v1/sandboxes/sb-x/ports/80/http"


def sent(*head):
    return request_head([(name.encode(), value.encode()) for name, value in head], 80, "http")


def answered(*head, status=200):
    raw = [(name.encode(), value.encode()) for name, value in head]
    return dict(response_head(raw, status, 80, PREFIX))


@pytest.mark.parametrize(
    "name",
    [
        # RFC 9110, 7.6.1, and what it names of RFC 2068.
        "connection",
        "keep-alive",
        "proxy-connection",
        "te",
        "trailer",
        "upgrade",
        "proxy-authorization",
        # What is the node's.
        "authorization",
        "x-forwarded-for",
        "x-forwarded-host",
        "x-real-ip",
        "forwarded",
        "via",
        "expect",
        "sec-websocket-key",
        "x-sandboxd-anything",
    ],
)
def test_what_does_not_reach_the_program(name):
    assert name.encode() not in dict(sent((name, "x"), ("accept", "y")))
    assert (b"accept", b"y") in sent((name, "x"), ("accept", "y"))


def test_what_connection_names_goes_with_it_but_never_the_framing():
    head = dict(
        sent(
            ("connection", "X-A, content-length,Host"),
            ("x-a", "1"),
            ("content-length", "3"),
            ("host", "node"),
        )
    )
    assert b"x-a" not in head
    assert head[b"content-length"] == b"3"
    assert head[b"host"] == b"localhost:80"


def test_a_chunked_body_has_no_length_beside_it():
    head = sent(("transfer-encoding", "chunked"), ("content-length", "3"))
    assert dict(head)[b"transfer-encoding"] == b"chunked"
    assert b"content-length" not in dict(head)


def test_credentials_for_the_program():
    head = sent(("authorization", "Bearer ours"), ("x-sandboxd-authorization", "Basic theirs"))
    assert [value for name, value in head if name == b"authorization"] == [b"Basic theirs"]


@pytest.mark.parametrize(
    ("location", "wanted"),
    [
        ("/a?b#c", PREFIX + b"/a?b#c"),
        ("http://localhost:80/a", PREFIX + b"/a"),
        ("https://127.0.0.1:80", PREFIX + b"/"),
        ("a/b", b"a/b"),
        ("//elsewhere/a", b"//elsewhere/a"),
        ("https://example.com/a", b"https://example.com/a"),
        ("http://localhost:81/a", b"http://localhost:81/a"),
        ("http://[bad", b"http://[bad"),
    ],
)
def test_where_a_redirect_leads(location, wanted):
    assert answered(("Location", location), status=302)[b"location"] == wanted


@pytest.mark.parametrize(
    ("cookie", "wanted"),
    [
        ("a=b", b"a=b; Path=" + PREFIX + b"/"),
        ("a=b; path=/; DOMAIN=node; Secure", b"a=b; Secure; Path=" + PREFIX + b"/"),
    ],
)
def test_a_cookie_is_bound_to_its_port(cookie, wanted):
    assert answered(("Set-Cookie", cookie))[b"set-cookie"] == wanted


@pytest.mark.parametrize(
    "name",
    [
        "Connection",
        "Transfer-Encoding",
        "Strict-Transport-Security",
        "Alt-Svc",
        "Clear-Site-Data",
        "Service-Worker-Allowed",
        "X-Sandboxd-Error",
        "Upgrade",
    ],
)
def test_what_does_not_come_back(name):
    assert answered((name, "x"), ("X-A", "1")) == {b"x-a": b"1"}


@pytest.mark.parametrize("status", [204, 304])
def test_an_answer_without_a_body_has_no_length(status):
    assert answered(("Content-Length", "9"), status=status) == {}
