"""Small real clusters on this machine: an SSH server, Slurm, Ray; all of one test, run as the user who runs the test."""
