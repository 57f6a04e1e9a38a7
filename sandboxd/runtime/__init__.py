"""The daemon's subject: the table of sandboxes and what is done in them. asyncio lives here.

From the inside out; each file knows only those above it::

    output      what is kept of a stream, and what is only counted
    control     one control socket to a sandbox's PID 1: ids, replies, its death
    failures    what a failed step in a sandbox means: the error to raise
    pipes       pipe ends in the event loop; what a command's children leave behind
    exec        one command: its clock, its output, its end
    frames      a stream's output and its end, as numbered lines
    stream      a command told while it runs, and kept for a client that was cut off
    files       whole files in and out as streams
    events      what became of one sandbox, the last of it
    port_connection  one connection to a program that listens in a sandbox
    sandbox     one sandbox's record, and how it is shown
    idempotency answers kept under an Idempotency-Key
    expiry      when each sandbox's time is up
    waiting     the bounded room before a full node
    ports       how many of those there may be
    processes   background processes: their spools, their stdin, their end
    shells      what is said to a session's interpreter, and what it answers
    session     one persistent interpreter: its commands, one at a time
    sessions    those of each sandbox
    manager     the table: create, find, delete, adopt, and what the launcher tells
    lifecycle   renew, pause, resume, usage, and the deletion of many

Nothing here knows HTTP, and nothing here starts a process or a thread for an exec: an exec is one
message out, two back, and what is in its pipes.
"""
