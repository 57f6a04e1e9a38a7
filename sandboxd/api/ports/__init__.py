"""HTTP, WebSockets and raw TCP between a client and a program that listens in a sandbox.

``headers`` says what passes of a request's and an answer's head, ``http`` carries one request,
``websocket`` one WebSocket or tunnel. Both ends are foreign here: the client has our token, the
program is the policy's and will answer with whatever may hurt. All that it sends goes through the
parsers of h11 and websockets, bounded, and is written anew.
"""
