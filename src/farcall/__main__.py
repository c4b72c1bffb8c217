"""``python -m farcall script.py args...`` runs a program with farcall in the place of ``torch.distributed.rpc``.

With anything else it is the ``farcall`` command.
"""

import sys


def main() -> None:
    """Run a program, or the command."""
    from farcall.compat.program import is_program, run_program

    if is_program(sys.argv[1:]):
        run_program(sys.argv[1:])
    else:
        from farcall.cli import main as run_command

        run_command()


if __name__ == "__main__":
    main()
