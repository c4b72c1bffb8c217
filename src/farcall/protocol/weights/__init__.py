"""Versions of published weights: who publishes a name, who has which version, and when its memory may be used again.

    messages.py     what members tell each other, with the identities in it
    lending.py      versions lent to members, until each has said that it reads them no more
    publisher.py    one publisher's tenure of a name
    subscriber.py   one member's versions of a name

Sans-I/O: no bytes of tensors, no memory, no clock. `docs/design/WEIGHTS.md` has the picture.
"""
