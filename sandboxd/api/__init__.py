"""The HTTP side: a thin spelling of ``sandboxd.runtime``.

``app``                 create_app: everything hangs off it
``auth``                the bearer token, on every route but liveness and readiness
``bodies``              JSON bodies, parsed from their bytes
``body_limit``          how large a request may be
``schemas``             what goes in and out, with ranges and examples
``answers``             the runtime's values as JSON
``disconnect``          noticing that a client has gone
``exception_handlers``  the one place that knows which HTTP status an error has
``routes``              one file a resource
"""
