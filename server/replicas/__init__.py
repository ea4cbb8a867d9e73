"""Several engines behind one API: which of them gets a request.

Owns: the router and its policy, what each engine keeps and has to do, the connections of an API process to engines.
May import: the ground files of server/, observe, engine/wire.
Never: knows HTTP, text, or how engines are started.
"""
