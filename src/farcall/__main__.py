"""``python -m farcall`` is the ``farcall`` command."""

from farcall.cli import main

if __name__ == "__main__":
    main()
