"""The only room that speaks HTTP to a server.

In: a server's address, a path, a body. Out: the status and body of its reply, or why none came. May import `assay` only.
"""
