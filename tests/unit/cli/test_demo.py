"""The demo's task, figures and picture, without its processes."""

from __future__ import annotations

import errno
import io
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch
from rich.console import Console

from farcall.cli.demo import picture, play, show, training
from farcall.cli.demo.play import Death, Figures, latency_s
from farcall.cli.demo.training import OPERATIONS, Outage, Step
from farcall.cli.team import TeamError


def figures() -> Figures:
    steps = [Step(f"trainer{n % 2}", 100.0 + n / 10, 1.0 / (n + 1), (1e-3, 2e-3, 3e-3, 4e-3)) for n in range(40)]
    death = Death("server1", 12, 10, killed_s=101.0, noticed_s=101.1, back_s=101.5)
    outage = Outage("trainer0", 101.0, 101.6, "PeerDead: server1 is gone")
    return Figures(100.0, death, steps, [outage], 0.5, [[0.0, 1.0], [0.5, 0.5]])


def test_points_are_the_same_for_the_same_seed_and_few_are_held_out_twice() -> None:
    points, labels = training.spirals(100, 7)
    again, _ = training.spirals(100, 7)
    assert torch.equal(points, again)
    assert set(labels.tolist()) == {0.0, 1.0}
    assert points.abs().max() < 1.2
    assert not torch.equal(training.held_out()[0][:100], points)


def test_losses_are_those_of_the_first_and_the_last_steps() -> None:
    found = figures()
    assert found.loss_at_first() == pytest.approx((1 + 1 / 2 + 1 / 3 + 1 / 4) / 4)
    assert found.loss_at_last() == pytest.approx((1 / 37 + 1 / 38 + 1 / 39 + 1 / 40) / 4)
    assert latency_s(found.steps, 1) == (2e-3, 2e-3)


def test_the_picture_says_what_happened() -> None:
    root = ElementTree.fromstring(picture.as_svg(figures()))
    texts = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "server1 killed," in texts
    assert "back after 0.50 s" in texts
    assert "1 steps failed, and were repeated" in texts
    for operation in OPERATIONS:
        assert operation in texts


@pytest.mark.parametrize("most", [0.8, 1.2, 9.1, 37.0, 110.0])
def test_marks_are_few_and_round_and_fit(most: float) -> None:
    marks = picture._round_marks(most)
    assert 3 <= len(marks) <= 8
    assert marks[0] == 0
    assert marks[-1] <= most


def test_a_fresh_folder_leaves_what_is_there(tmp_path: Path) -> None:
    assert show._fresh(tmp_path) == tmp_path / "farcall-demo"
    (tmp_path / "farcall-demo").mkdir()
    (tmp_path / "farcall-demo-2").mkdir()
    assert show._fresh(tmp_path) == tmp_path / "farcall-demo-3"


def run_demo(folder: Path | None = None) -> int:
    return show.run(Console(file=io.StringIO()), 100, folder)


@pytest.mark.parametrize("why", [TeamError("server0 did not answer in 120 s"), OSError(errno.EAGAIN, "no processes")])
def test_workers_that_do_not_start_are_one_line_and_leave_no_folder(
    why: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def start(*arguments: object, **options: object) -> None:
        raise why

    monkeypatch.setattr(play, "Team", start)
    monkeypatch.chdir(tmp_path)
    assert run_demo() == 1
    complaint = f"farcall: the demo failed: cannot start the workers: {why}"
    assert capsys.readouterr().err.splitlines() == [complaint]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", [show.PICTURE, show.FIGURES])
def test_a_file_that_cannot_be_written_is_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(play.Play, "run", lambda self: figures())
    (tmp_path / name).symlink_to("/dev/full")
    assert run_demo(tmp_path) == 1
    complaint = f"farcall: the demo failed: cannot write {tmp_path / name}: No space left on device"
    assert capsys.readouterr().err.splitlines() == [complaint]


def test_a_trace_that_cannot_be_written_is_named() -> None:
    complaint = "cannot write /dev/full: No space left on device"
    with pytest.raises(play.DemoFailed, match=complaint), play.writing(Path("/dev/full")) as path:
        path.write_text("much")


def test_an_interrupted_demo_leaves_a_folder_that_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(self: play.Play) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(play.Play, "run", interrupt)
    assert run_demo(tmp_path) == 130
    assert tmp_path.exists()
    assert run_demo(tmp_path / "new") == 130
    assert not (tmp_path / "new").exists()
