"""What goes in and out over HTTP: the public spelling of ``sandboxd.model``, a module a subject.

Bodies are strict: an unknown field, a number in a string, NaN, a NUL byte in a string or an ``=``
in a variable's name is refused (``request-invalid``), never repaired. What a node allows beyond
these ranges is its configuration's to say (``GET /v1/node``).
"""
