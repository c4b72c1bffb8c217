"""The table of `weights.py`: each figure with its target, and whether that is met.

    python benchmarks/weights_table.py      # of the results that are kept

Two rows are those of tests, which record them as properties: members killed at any moment, and a version that crosses a
link of 1 Gbit/s to another host with four subscribers, in network namespaces, which takes root. The row of a GPU is the
kept one of `gpu_weights.py`.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import xml.etree.ElementTree
from pathlib import Path
from typing import Any, NamedTuple

RESULTS = Path(__file__).parent / "results"
FAULTS = {
    "kills": "tests/faults/test_weights.py",
    "hosts": "tests/faults/test_weights_between_hosts.py::test_a_version_crosses_once_and_is_shared_there",
}

FAILED = {"rounds": 0.0, "longest_wait_s": float("inf"), "crossed": float("inf")}


class Row(NamedTuple):
    """A figure, None: it was not measured; and what it is to be, empty: it is only told."""

    what: str
    found: float | None
    wanted: str = ""

    @property
    def verdict(self) -> str:
        if not self.wanted:
            return ""
        if self.found is None:
            return "not measured"
        relation, bound = self.wanted.split()
        is_met = self.found >= float(bound) if relation == ">=" else self.found <= float(bound)
        return "met" if is_met else "MISSED"


def run_faults(kills: int) -> dict[str, dict[str, float]]:
    """What the tests of faults record, the largest of each; nothing of those that are skipped."""
    found: dict[str, dict[str, float]] = {}
    for name, test in FAULTS.items():
        with tempfile.NamedTemporaryFile(suffix=".xml") as file:
            options = ["-q", f"--junitxml={file.name}", "-o", "junit_family=xunit1"]
            environment = os.environ | {"FARCALL_ROUNDS": str(kills)}
            command = [sys.executable, "-m", "pytest", test, *options]
            done = subprocess.run(command, cwd=RESULTS.parents[1], env=environment, stdout=sys.stderr, check=False)
            found[name] = figures = {}
            if done.returncode:
                figures |= FAILED
                continue
            for one in xml.etree.ElementTree.parse(file.name).iter("property"):
                key, value = one.attrib["name"], float(one.attrib["value"])
                before = figures.get(key, 0.0)
                figures[key] = before + value if key == "rounds" else max(before, value)
    return found


def rows(figures: dict[str, Any]) -> list[Row]:
    medians = {name: statistics.median(took) for name, took in figures["seconds"].items()}
    ours, floor, calls = medians["farcall"], medians["floor"], medians["calls in turn"]
    stock = medians.get("stock calls in turn")
    alone, loads, copies = (figures[f"step_{name}_s"] for name in ("alone", "beside_loads", "beside_copies"))
    kills, hosts = (figures.get("faults", {}).get(name, {}) for name in FAULTS)
    gpu = json.loads((RESULTS / "gpu-weights.json").read_text())
    return [
        Row("gloo / farcall", medians["gloo"] / ours, ">= 2"),
        Row("calls in turn / farcall", calls / ours, ">= 4"),
        Row("stock calls in turn / farcall", None if stock is None else stock / ours, ">= 4"),
        Row("calls in turn / floor: no way through memory gains more", calls / floor),
        Row("stock calls in turn / floor", None if stock is None else stock / floor),
        Row("floor / farcall", floor / ours, ">= 0.7"),
        Row("get, each subscriber, ms", 1e3 * medians["get, each"], "<= 1"),
        Row("get, the last of three, ms", 1e3 * medians["get"]),
        Row("step beside loads / alone", loads / alone),
        Row("step beside copies / alone", copies / alone),
        Row("step beside loads / beside copies", loads / copies, "<= 1.1"),
        Row("deaths and takeovers: rounds without a torn version", kills.get("rounds"), ">= 1000"),
        Row("deaths and takeovers: longest wait, s", kills.get("longest_wait_s"), "<= 2"),
        Row("two hosts: bytes over the link / of the version", hosts.get("crossed"), "<= 1.1"),
        Row("two hosts: rate / that of the link", hosts.get("share_of_link")),
        Row(
            f"{gpu['about']['device']}, kept: load / device copy",
            gpu["cases"]["version by the device, load"] / gpu["cases"]["device copy"],
            ">= 0.8",
        ),
    ]


def report(figures: dict[str, Any]) -> None:
    medians = {name: statistics.median(took) for name, took in figures["seconds"].items()}
    who = f"1 publisher, 3 subscribers, {figures['cores']} cores"
    print(f"{figures['mib']} MiB in {figures['tensors']} tensors, {who}")
    for name, took in sorted(figures["seconds"].items(), key=lambda item: medians[item[0]]):
        print(f"  {name:20} median {1e3 * medians[name]:8.2f} ms   best {1e3 * min(took):8.2f} ms")
    for row in rows(figures):
        found = "-" if row.found is None else f"{row.found:.2f}"
        print(f"  {row.what:56} {found:>8}  {row.wanted:8} {row.verdict}")


if __name__ == "__main__":
    report(json.loads((RESULTS / "weights.json").read_text()))
