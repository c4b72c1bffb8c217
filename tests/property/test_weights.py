"""Any nest of tensors, views and other values comes out of a version as it went in, ties included; loans never leak."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farcall.protocol.weights.lending import Freed, Lend, Lender, Stranded
from farcall.protocol.weights.messages import Claim, Key
from farcall.weights.layout import name_of, plan_storages, take_apart
from farcall.weights.manifest import Content, Layout, Manifest, Storage, decode_manifest, encode_manifest
from farcall.weights.memory import BlockStore, aligned
from farcall.weights.publication import _encode_values, _places
from farcall.weights.version import HeldVersion

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]


@st.composite
def tensors(draw: st.DrawFn, bases: list[torch.Tensor]) -> torch.Tensor:
    """A tensor of its own, or a view of one that others have, too."""
    if bases and draw(st.booleans()):
        base = draw(st.sampled_from(bases))
        how = draw(st.sampled_from(["same", "flat", "part", "turned", "every other", "expanded", "bytes"]))
        if how == "same" or not base.numel():
            return base
        if how == "bytes":
            return base.flatten().view(torch.uint8)
        if how == "expanded":
            return base.flatten()[:1].expand(3)
        flat = base.flatten()
        start = draw(st.integers(0, flat.numel() - 1))
        return {"flat": flat, "part": flat[start:], "turned": base.t(), "every other": flat[start::2]}[how]
    dtype = draw(st.sampled_from(DTYPES))
    rows, columns = draw(st.sampled_from([(1, 0), (1, 1), (1, 7), (3, 5), (8, 130)]))
    made = (torch.arange(rows * columns) % 251 + draw(st.integers(0, 3))).to(dtype).view(rows, columns)
    bases.append(made)
    return made


@st.composite
def nests(draw: st.DrawFn) -> dict[str | int, Any]:
    bases: list[torch.Tensor] = []

    def node(depth: int) -> Any:
        kind = draw(st.sampled_from(["tensor", "tensor", "value", "dict", "list", "tuple"]))
        if depth > 2 or kind == "tensor":
            return draw(tensors(bases))
        if kind == "value":
            return draw(st.one_of(st.integers(-5, 5), st.text(max_size=3), st.none(), st.just([1, "x"])))
        items = [node(depth + 1) for _ in range(draw(st.integers(0, 3)))]
        if kind == "dict":
            return {f"k{index}": item for index, item in enumerate(items)}
        return items if kind == "list" else tuple(items)

    return {name: node(1) for name in draw(st.sets(st.sampled_from(["a", "b", "c", 0, 1]), max_size=4))}


def through_a_version(source: Any, dtype: torch.dtype | None = None) -> Any:
    """What a subscriber gets."""
    leaves = take_apart(source)
    plans = plan_storages(leaves.tensors, dtype)
    store = BlockStore(is_shared=True)
    try:
        block = store.take(sum(aligned(plan.size_bytes) for plan in plans) or 1)
        storages, checksums, offset = [], [], 0
        for plan in plans:
            view = block.view[offset : offset + plan.size_bytes]
            storages.append(Storage(0, offset, plan.size_bytes))
            checksums.append(plan.fill(view) if plan.size_bytes else 0)
            offset += aligned(plan.size_bytes)
        contents = [Content(1, block.block_id, block.fill, block.size)]
        containers = list(leaves.containers.items())
        layout = Layout(storages, _places(leaves, plans), containers, list(leaves.values))
        manifest = Manifest(contents, layout, checksums, *_encode_values(leaves))
        held = HeldVersion(Key(Claim(1, 1), 1), decode_manifest(encode_manifest(manifest)))
        held.blocks = [block]
        held.verify()
        return held.nested(held.tensors([block.private_view()]))
    finally:
        store.close()


def compare(given_: Any, got: Any) -> None:
    if isinstance(given_, torch.Tensor):
        assert given_.dtype == got.dtype
        assert torch.equal(given_, got)
    elif isinstance(given_, dict):
        assert given_.keys() == got.keys()
        for key in given_:
            compare(given_[key], got[key])
    elif isinstance(given_, list | tuple):
        assert type(given_) is type(got)
        for one, other in zip(given_, got, strict=True):
            compare(one, other)
    else:
        assert given_ == got


@settings(max_examples=50)
@given(nests())
def test_what_goes_in_comes_out(source: dict[str | int, Any]) -> None:
    got = through_a_version(source)
    compare(source, got)
    # Tensors that overlap go on doing so, byte for byte.
    there, here = take_apart(source).tensors, take_apart(got).tensors
    starts = {name_of(path): (one.data_ptr(), here[path].data_ptr()) for path, one in there.items() if one.numel()}
    for path, one in there.items():
        for other_path, other in there.items():
            if one.numel() and other.numel() and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr():
                before, after = starts[name_of(path)], starts[name_of(other_path)]
                if before[0] == after[0] and one.shape == other.shape and one.stride() == other.stride():
                    assert before[1] == after[1], "tied tensors came apart"


@settings(max_examples=20)
@given(nests())
def test_what_is_converted_is_what_torch_converts_it_to(source: dict[str | int, Any]) -> None:
    got = take_apart(through_a_version(source, torch.bfloat16)).tensors
    for path, one in take_apart(source).tensors.items():
        alone = got[path].dtype == torch.bfloat16 or not one.dtype.is_floating_point
        wanted = one.to(torch.bfloat16) if one.dtype.is_floating_point and alone else one
        assert torch.equal(wanted, got[path])


@settings(max_examples=80)
@given(
    st.integers(1, 3),
    st.lists(st.tuples(st.sampled_from("pwuclmd"), st.integers(0, 3), st.integers(0, 9)), max_size=80),
)
def test_no_version_is_freed_while_it_is_lent(keep: int, steps: list[tuple[str, int, int]]) -> None:
    """p: a push. A member: w, wants versions; u, no more; l, dies; m, c, d: answers mapped, copied, dropped."""
    lender, number, serial = Lender(keep), 0, 0
    lent: Counter[tuple[int, int]] = Counter()
    live: set[int] = set()
    for what, member, which in steps:
        borrowed = sorted({version for one, version in lent if one == member})
        if what == "p":
            number += 1
            live.add(number)
            effects = lender.push(number)
        elif what in "wu":
            serial += 1
            effects = lender.want(member, what == "w", serial)
        elif what == "l":
            effects = lender.lose(member)
            for version in borrowed:
                del lent[member, version]
        elif not borrowed:
            continue
        else:
            version = borrowed[which % len(borrowed)]
            if what != "m":
                lent[member, version] -= 1
                lent = +lent
            effects = lender.take(member, version, {"m": "mapped", "c": "copied", "d": "dropped"}[what])  # type: ignore[arg-type]
        for effect in effects:
            if isinstance(effect, Lend):
                assert effect.number == number
                lent[effect.member, effect.number] += 1
            elif isinstance(effect, Freed):
                assert not any(version == effect.number for _, version in lent)
                live.remove(effect.number)
            else:
                assert isinstance(effect, Stranded)
        in_use = {version for _, version in lent}
        assert live == in_use | set(sorted(live)[-keep:]), "what nobody reads is freed at once"
