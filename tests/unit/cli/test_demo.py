"""The demo's task, figures and picture, without its processes."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch

from farcall.cli.demo import picture, show, task
from farcall.cli.demo.figures import OPERATIONS, Death, Figures, Outage, Step, latency_s


def figures() -> Figures:
    steps = [Step(f"trainer{n % 2}", 100.0 + n / 10, 1.0 / (n + 1), (1e-3, 2e-3, 3e-3, 4e-3)) for n in range(40)]
    death = Death("server1", 12, 10, killed_s=101.0, noticed_s=101.1, back_s=101.5)
    outage = Outage("trainer0", 101.0, 101.6, "PeerDead: server1 is gone")
    return Figures(100.0, death, steps, [outage], 0.5, [[0.0, 1.0], [0.5, 0.5]])


def test_points_are_the_same_for_the_same_seed_and_few_are_held_out_twice() -> None:
    points, labels = task.spirals(100, 7)
    again, _ = task.spirals(100, 7)
    assert torch.equal(points, again)
    assert set(labels.tolist()) == {0.0, 1.0}
    assert points.abs().max() < 1.2
    assert not torch.equal(task.held_out()[0][:100], points)


def test_a_shared_layer_lets_its_weights_change_between_forward_and_backward() -> None:
    layer = task.SharedLinear(2, 2)
    inputs = torch.ones(1, 2, requires_grad=True)
    loss = layer(inputs).sum()
    before = layer.weight.detach().clone()
    with torch.no_grad():
        layer.weight.add_(1.0)  # another trainer's optimizer
    loss.backward()
    assert inputs.grad is not None
    assert torch.allclose(inputs.grad[0], before.sum(0))


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
    assert "1 steps that failed, and were done again" in texts
    for operation in OPERATIONS:
        assert operation in texts


@pytest.mark.parametrize(
    ("seconds", "text"), [(2.0, "2 s"), (0.9996, "1 s"), (0.0123, "12.3 ms"), (0.00099, "990 us"), (1e-7, "0.1 us")]
)
def test_durations_for_people(seconds: float, text: str) -> None:
    assert picture._duration(seconds) == text


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
