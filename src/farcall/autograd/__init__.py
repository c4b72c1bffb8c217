"""Distributed autograd: contexts, recorded sends and receives, and backward passes over torch's own engine.

`functions` records what crosses workers, `engine` runs one worker's part of the graph, `passes` joins that
part to the protocol, `context` holds it all by context id. None of them knows sockets: they speak to a
`Port`.
"""
