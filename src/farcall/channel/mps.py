"""NVIDIA's Multi-Process Service (MPS), with which processes compute on one device at the same time.

Without it they take turns, 0.16 ms each. CUDA looks for its daemon in a folder, as this process begins to use a device.
"""

from __future__ import annotations

import errno
import os
import socket

CONTROL = "nvidia-cuda-mps-control"
ENV_PIPES = "CUDA_MPS_PIPE_DIRECTORY"
REMEDY = f"before they start, `{CONTROL} -d`; or farcall.launch(..., mps=True), for the workers that it starts"


def is_served(folder: str | None = None) -> bool:
    """Does a daemon listen in ``folder``; None: where CUDA looks for it in this process?"""
    path = os.path.join(folder or os.environ.get(ENV_PIPES) or "/tmp/nvidia-mps", "control")
    # It listens with another kind of socket, so the kernel answers, and the daemon hears nothing.
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as asking:
        try:
            return asking.connect_ex(path) == errno.EPROTOTYPE
        except OSError:
            return False  # the path is too long for any socket
