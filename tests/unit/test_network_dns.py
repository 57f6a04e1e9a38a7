"""What a sandbox is told of names, and what leaves for an upstream because of it."""

from __future__ import annotations

import asyncio

import dns.edns
import dns.flags
import dns.message
import dns.rcode
import dns.rrset
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandboxd.network.dns import OPEN_MAX, QUERIES_BURST, UDP_BYTES_MAX, Answerer, Client
from sandboxd.network.egress import ENTRIES_MAX, EgressLog
from sandboxd.network.policy import policy_of


class Upstream:
    """Answers A from a table; remembers what it was asked, and what was opened."""

    def __init__(self, names, fail=None):
        self.names = names
        self.fail = fail
        self.asked = []
        self.opened = []

    async def ask(self, query):
        self.asked.append(query)
        if self.fail is not None:
            raise self.fail
        response = dns.message.make_response(query)
        addresses = self.names.get(query.question[0].name.to_text(omit_final_dot=True))
        if addresses is None:
            response.set_rcode(dns.rcode.NXDOMAIN)
        else:
            owner = query.question[0].name
            alias = dns.rrset.from_text(owner, 7, "IN", "CNAME", "cdn.test.")
            records = dns.rrset.from_text_list("cdn.test.", 60, "IN", "A", addresses)
            response.answer = [alias, records]
        return dns.message.from_wire(response.to_wire())

    async def open(self, link, addresses, ports, timeout_s):
        if self.fail is not None:
            raise self.fail
        self.opened.append((link, list(addresses), list(ports), timeout_s))


def client_of(allow=(), mode="allow", group=None):
    return Client(7, "sb-1", policy_of(mode, allow), group, EgressLog())


def ask(client, upstream, name, kind="A", size_max=UDP_BYTES_MAX, **query):
    message = dns.message.make_query(name, kind, **query)
    answerer = Answerer(upstream.ask, upstream.open)
    wire = asyncio.run(answerer.answer(client, message.to_wire(), size_max))
    return None if wire is None else dns.message.from_wire(wire)


def addresses_in(response):
    return [rdata.address for rrset in response.answer for rdata in rrset]


def test_allowed_name_is_flat_and_open_before_it_is_told():
    upstream = Upstream({"a.test": ["198.51.100.1", "198.51.100.2"]})
    response = ask(client_of(["a.test:80/tcp"]), upstream, "A.test.")
    assert sorted(addresses_in(response)) == ["198.51.100.1", "198.51.100.2"]
    assert [rrset.name.to_text() for rrset in response.answer] == ["A.test."]
    assert response.answer[0].ttl == 7  # the least of the chain
    ((link, opened, ports, timeout_s),) = upstream.opened
    assert (link, sorted(opened)) == (7, ["198.51.100.1", "198.51.100.2"])
    assert [(one.protocol, one.first, one.last) for one in ports] == [("tcp", 80, 80)]
    assert timeout_s > response.answer[0].ttl


def test_what_cannot_be_opened_is_not_told():
    upstream = Upstream({"a.test": ["198.51.100.1"]})

    async def refuse(*_):
        raise OSError(1, "no")

    upstream.open = refuse
    response = ask(client_of(["a.test"]), upstream, "a.test.")
    assert response.rcode() == dns.rcode.SERVFAIL
    assert response.answer == []


@pytest.mark.parametrize("name", ["secret.evil.test.", "xa.test.", "b.a.test.", ".", "test."])
@pytest.mark.parametrize("kind", ["A", "AAAA", "TXT", "NULL", "ANY"])
def test_name_that_is_not_allowed_never_leaves(name, kind):
    upstream = Upstream({})
    client = client_of(["a.test"])
    response = ask(client, upstream, name, kind)
    assert response.rcode() == dns.rcode.NXDOMAIN
    assert upstream.asked == []
    assert client.log.counts["dns_denied"] == 1


@pytest.mark.parametrize("kind", ["AAAA", "TXT", "MX", "SRV", "HTTPS", "NULL", "ANY", "CNAME"])
def test_other_types_of_an_allowed_name_are_empty_and_never_leave(kind):
    upstream = Upstream({"a.test": ["198.51.100.1"]})
    response = ask(client_of(["a.test"]), upstream, "a.test.", kind)
    assert (response.rcode(), response.answer, upstream.asked) == (dns.rcode.NOERROR, [], [])


def test_nothing_of_the_query_but_its_name_goes_upstream():
    upstream = Upstream({"a.test": ["198.51.100.1"]})
    secret = dns.edns.GenericOption(65001, b"secret")
    ask(client_of(["a.test"]), upstream, "a.TEST.", use_edns=0, options=[secret])
    (sent,) = upstream.asked
    assert sent.question[0].name.to_text() == "a.test."
    assert b"secret" not in sent.to_wire()


def test_private_addresses_are_stripped_and_not_opened():
    answers = ["169.254.169.254", "10.0.0.1", "127.0.0.1", "198.51.100.1", "100.126.0.9"]
    upstream = Upstream({"a.test": answers})
    response = ask(client_of(["a.test"]), upstream, "a.test.")
    assert addresses_in(response) == ["198.51.100.1"]
    assert upstream.opened[0][1] == ["198.51.100.1"]
    only_private = Upstream({"a.test": answers[:3]})
    response = ask(client_of(["a.test"]), only_private, "a.test.")
    assert (response.rcode(), response.answer) == (dns.rcode.NOERROR, [])
    assert only_private.opened == []


def test_name_of_a_run_is_told_to_its_members_alone():
    upstream = Upstream({})
    member = client_of(group={"web": {"100.126.0.9"}})
    assert addresses_in(ask(member, upstream, "web.")) == ["100.126.0.9"]
    assert ask(client_of(), upstream, "web.").rcode() == dns.rcode.NXDOMAIN
    assert upstream.asked == []


def test_upstream_that_fails_is_a_failure_and_not_an_empty_answer():
    response = ask(client_of(["a.test"]), Upstream({}, OSError(101, "no")), "a.test.")
    assert response.rcode() == dns.rcode.SERVFAIL
    assert ask(client_of(["a.test"]), Upstream({}), "a.test.").rcode() == dns.rcode.NXDOMAIN


def test_flood_of_queries_is_not_answered():
    upstream = Upstream({"a.test": ["198.51.100.1"]})
    client = client_of(["a.test"])
    answers = [ask(client, upstream, "a.test.") for _ in range(int(QUERIES_BURST) + 100)]
    assert answers[0] is not None
    assert answers.count(None) > 0
    other = client_of(["a.test"])
    assert ask(other, upstream, "a.test.") is not None, "another sandbox pays nothing for it"


def test_open_addresses_of_one_sandbox_are_bounded():
    client = client_of(["*.test"])
    client.opened = dict.fromkeys((str(n) for n in range(OPEN_MAX)), float("inf"))
    upstream = Upstream({"a.test": ["198.51.100.1"]})
    assert ask(client, upstream, "a.test.").rcode() == dns.rcode.SERVFAIL
    assert upstream.opened == []


def test_answer_for_an_old_program_fits_512_bytes():
    upstream = Upstream({"a.test": [f"198.51.100.{n}" for n in range(1, 200)]})
    client = client_of(["a.test"])
    query = dns.message.make_query("a.test.", "A", use_edns=False).to_wire()
    answerer = Answerer(upstream.ask, upstream.open)
    wire = asyncio.run(answerer.answer(client, query, UDP_BYTES_MAX))
    assert len(wire) <= 512
    response = dns.message.from_wire(wire)
    assert not response.flags & dns.flags.TC
    assert set(addresses_in(response)) == set(upstream.opened[0][1])


def test_what_is_no_query_is_not_answered():
    upstream = Upstream({})
    answerer = Answerer(upstream.ask, upstream.open)
    response = dns.message.make_response(dns.message.make_query("a.test.", "A")).to_wire()
    empty = dns.message.Message().to_wire()
    for wire in (b"", b"\0" * 11, response, empty, b"\xff" * 600):
        assert asyncio.run(answerer.answer(client_of(["a.test"]), wire, 512)) is None


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=600))
def test_any_bytes_are_borne(data):
    upstream = Upstream({})
    answerer = Answerer(upstream.ask, upstream.open)
    whole = dns.message.make_query("a.test.", "A").to_wire()
    for wire in (data, whole[: len(data) % len(whole)] + data):
        asyncio.run(answerer.answer(client_of(["a.test"]), wire, 512))


def test_log_is_bounded_and_counts_what_repeats():
    log = EgressLog()
    for n in range(3 * ENTRIES_MAX):
        log.connection(False, "tcp", "198.51.100.1", n + 1)
        log.connection(True, "tcp", "198.51.100.2", 80)
    page = log.page(0, 10 * ENTRIES_MAX)
    assert len(page["entries"]) == ENTRIES_MAX
    assert page["entries"][-1]["count"] == 3 * ENTRIES_MAX
    assert page["counts"]["entries_dropped"] == 2 * ENTRIES_MAX + 1
    seqs = [entry["seq"] for entry in page["entries"]]
    assert seqs == sorted(seqs)
    log.connection(True, "tcp", "198.51.100.2", 80)
    (news,) = log.page(seqs[-1], 10)["entries"]
    assert news["count"] == 3 * ENTRIES_MAX + 1


def test_long_name_is_cut_in_the_log():
    log = EgressLog()
    log.query(False, "A", "a" * 5000, ())
    assert len(log.page(0, 1)["entries"][0]["name"]) == 255
