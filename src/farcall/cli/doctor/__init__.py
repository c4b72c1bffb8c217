"""``farcall doctor``: what works on this machine, and between it and others, and what to do about what does not."""
