"""Small real clusters on this machine: an SSH server, Slurm, Ray; each of one test, and of the user who runs it."""
