"""Run PyTorch's RPC suite, or a part of it, and say what came of it: ``python -m tests.conformance -k rref``.

For iterating while something is being fixed, and for comparing with stock torch (``--stock``). What ``make test``
runs is ``test_conformance.py``; both judge by the same list.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import sys
import time
from pathlib import Path

import torch
from tests.conformance.client import BOUND_S, JOBS, SuiteRun
from tests.conformance.listing import complaint, not_passed, sorted_tests
from tests.conformance.suite import part_of


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    parser.add_argument("-k", metavar="WORD", action="append", default=[], help="tests whose name contains this")
    parser.add_argument("--sort", default="abcd", metavar="LETTERS", help="only tests of these sorts")
    parser.add_argument("--list", type=Path, metavar="FILE", help="only the tests named in this file, one on each line")
    parser.add_argument("--stock", action="store_true", help="torch's own RPC instead of farcall")
    parser.add_argument("--jobs", type=int, default=JOBS, help=f"tests at a time (default {JOBS})")
    parser.add_argument("--bound", type=float, default=BOUND_S, metavar="SECONDS", help="for each test")
    parser.add_argument("--repeat", type=int, default=1, metavar="N", help="each test N times")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write every result as a line of JSON")
    parser.add_argument("-q", "--quiet", action="store_true", help="no stories of failures")
    return parser.parse_args()


def selected(asked: argparse.Namespace) -> list[str]:
    tests = [test for test, letter in sorted_tests().items() if letter in asked.sort]
    if asked.k:
        tests = [test for test in tests if any(word in test for word in asked.k)]
    if asked.list is not None:
        named = set(asked.list.read_text().split())
        tests = [test for test in tests if test in named]
    # By part, so that only one server works at a time.
    return sorted(tests, key=lambda test: (part_of(test) == "faulty", test))


def main() -> int:
    asked = parsed()
    tests = selected(asked)
    letters = sorted_tests()
    listed = {} if asked.stock else not_passed(torch.cuda.device_count())
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    complaints = []
    started = time.monotonic()
    out = asked.out.open("w") if asked.out is not None else None
    for _ in range(asked.repeat):
        with SuiteRun(tests, stock=asked.stock, jobs=asked.jobs, bound_s=asked.bound) as run:
            for test in tests:
                result = run.result(test)
                wrong = complaint(result.outcome, result.detail, listed.get(test))
                counts[letters[test]][result.outcome] += 1
                print(
                    f"{'!' if wrong else ' '} {result.outcome:8}{result.seconds:6.1f} s  {letters[test]}  {test}",
                    flush=True,
                )
                if wrong is not None:
                    complaints.append(test)
                    if not asked.quiet:
                        print(wrong, flush=True)
                if out is not None:
                    print(json.dumps({**dataclasses.asdict(result), "sort": letters[test]}), file=out, flush=True)
    if out is not None:
        out.close()
    for letter in sorted(counts):
        print(f"{letter}: " + ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts[letter].items())))
    print(f"{len(complaints)} not as listed, {time.monotonic() - started:.0f} s")
    for test in complaints:
        print(f"  {test}")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
