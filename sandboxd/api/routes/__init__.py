"""One file a resource; each has a ``router`` that ``sandboxd.api.app`` includes."""
