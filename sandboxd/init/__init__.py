"""The C processes of a sandbox (``sandbox_init``: zygote and PID 1) and their protocol.

``protocol.h`` is the contract; ``protocol.py`` mirrors it for Python. The binary is compiled by the
build hook (``build_hook.py``) and lies beside this file.
"""
