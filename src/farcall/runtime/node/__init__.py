"""One member of a cluster, and its parts. Other folders import the names below from here.

    runtime.py        names the parts of a member, and wires them
    start.py          brings them up: meets the others, connects, serves
    ending.py         takes them down: shutdown, expulsion, exit, fork
    rejoin.py         the way back after an expulsion
    hooks.py          the functions that the layers above have it call
    lifecycle.py      new, starting, running ...: the states, and the one way to change them
    current.py        the runtimes of this process, and which of them a thread works for
    torch_threads.py  torch's number of threads, the same in all that run functions
    resources.py      parts that need no peer: the I/O thread, memory, a listener
    cluster_links.py  parts that face the others: peers, their links, the failure detector
    dispatcher.py     the handler of each message that arrives

Of these only `dispatcher.py` is on the way of every call.
"""

from farcall.runtime.node.current import HasRuntime, current_runtime, runtime_of, runtime_of_thread
from farcall.runtime.node.runtime import Runtime
from farcall.runtime.node.start import serve, start_runtime

__all__ = ["HasRuntime", "Runtime", "current_runtime", "runtime_of", "runtime_of_thread", "serve", "start_runtime"]
