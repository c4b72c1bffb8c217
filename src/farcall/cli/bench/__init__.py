"""``farcall bench``: farcall, stock ``torch.distributed.rpc`` and the floor, measured in one run.

    cases.py       the cases: one line for each
    functions.py   the functions that cases call, and members that die and join meanwhile
    measure.py     the timing of an operation
    contenders.py  farcall and stock behind one interface, and the floor: bare sockets and bare copies
    driver.py      rounds, turns and teams of processes
    results.py     medians over the rounds, ratios within each round, and farcall's promises
    report.py      tables, JSON and the picture

To add a case, add a line to ``cases.CASES``; to promise something of it, a line to ``results.TARGETS``.
"""
