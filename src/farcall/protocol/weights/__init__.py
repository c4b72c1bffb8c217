"""Versions of published weights: the publisher of each name, the holders of each version, and when memory is reusable.

    messages.py     the messages between members, with the identities in them
    directory.py    the publisher of each name, as far as one member has heard
    lending.py      versions lent to members, until each borrower has stopped reading them
    publisher.py    one publisher's tenure of a name
    subscriber.py   one member's versions of a name
    fetching.py     the route of a version's bytes to other hosts

Sans-I/O: no bytes of tensors, no memory, no clock. `docs/design/WEIGHTS.md` has the picture.
"""
