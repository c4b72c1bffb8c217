"""``farcall bench``: farcall, stock ``torch.distributed.rpc`` and the floor, measured in one run.

    cases.py       what is measured: one line for each case
    measure.py     how an operation is timed
    contenders.py  who is measured: farcall and stock, behind one interface
    churn.py       members that die and join while others are measured
    floor.py       what the machine allows: bare sockets and bare copies
    driver.py      rounds, turns and teams of processes
    results.py     medians over the rounds, and ratios within each round
    targets.py     what farcall promises, judged from the results
    report.py      tables and JSON
    plot.py        the picture

To add a case, add a line to ``cases.CASES``; to promise something of it, a line to ``targets.TARGETS``.
"""
