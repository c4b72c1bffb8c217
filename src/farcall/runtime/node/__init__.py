"""One member of a cluster, and what it consists of. Other folders import `Node` and `current_node` from here.

    node.py          the member: wires its parts together, starts and stops them
    face.py          the questions that anybody may ask it, and what the layers above attach to it
    life.py          new, starting, running ...: the states, and who may change them
    process.py       which nodes this process has, and which of them a thread works for
    foundation.py    what it has without anybody else: I/O thread, workers, memory, a door
    company.py       what it has with the others: peers, links that come back, the watch
    arrivals.py      what each message that comes is handed to
    turnover.py      what follows when a member joins, changes or is gone
    housekeeping.py  what is looked after from time to time

Of these only `arrivals.py` is on the way of every call.
"""

from farcall.runtime.node.node import Node
from farcall.runtime.node.process import Current, current_node, node_of_thread

__all__ = ["Current", "Node", "current_node", "node_of_thread"]
