"""The HTTP API: endpoints, the life of a request, plain and streamed answers.

Owns: request bodies, admission, generations, server-sent events, middleware, the page at /.
May import: tools/, batches/, replicas/ and the layers below them; engine/wire.
Never: imports torch or more of the engine than its client side; starts a process.
"""
