"""One member of a cluster, and what it consists of. Other folders import `Node` and `current_node` from here.

    node.py          the member: wires its parts together, starts and stops them
    node_api.py          the questions that anybody may ask it, and what the layers above attach to it
    lifecycle.py          new, starting, running ...: the states, and who may change them
    current.py       which nodes this process has, and which of them a thread works for
    resources.py    what it has without anybody else: I/O thread, workers, memory, a door
    cluster_links.py       what it has with the others: peers, links that come back, the watch
    dispatcher.py      what each message that comes is handed to

Of these only `dispatcher.py` is on the way of every call.
"""

from farcall.runtime.node.current import Current, current_node, node_of_thread
from farcall.runtime.node.node import Node

__all__ = ["Current", "Node", "current_node", "node_of_thread"]
