"""A function that travels as a unit and values behaves as one that cloudpickle took along whole."""

from __future__ import annotations

import asyncio
import copy
import gc
import inspect
import itertools
import textwrap
import weakref
from types import FunctionType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from farcall.protocol.frames import REQUEST, Frame
from farcall.serialize import units, write_value
from farcall.serialize.functions import DIGEST_BYTES

cloudpickle = pytest.importorskip("cloudpickle")

PROGRAMS = {
    "a global": ("factor = 3\ndef f(x): return factor * x", (2,)),
    "globals of all kinds": (
        "import math\nimport torch\nfrom os.path import join\nkeys = {'a': (1, [2.5, None]), 3: {4}}\n"
        "t = torch.ones(2)\ndtype = torch.float64\n"
        "def f(x): return math.floor(x), join('a', 'b'), keys, (t * x).tolist(), torch.zeros(1, dtype=dtype).dtype",
        (2.5,),
    ),
    "globals of the library's small classes": (
        "import argparse\nimport re\nfrom datetime import timedelta\nfrom pathlib import Path\n"
        "word = re.compile('a+')\nroot = Path('x')\nlimit = timedelta(1)\noptions = argparse.Namespace(rate=[0.1])\n"
        "class A:\n    def m(self): return word.pattern, root / 'z'\n"
        "def f(x): return word.match(x)[0], root / 'y', limit.days, options.rate, A().m()",
        ("aab",),
    ),
    "a namespace of functions": (
        "from types import SimpleNamespace\ndef g(): return 1\nkept = SimpleNamespace(g=g)\n"
        "def f(): return kept.g() , kept.g is g",
        (),
    ),
    "a submodule that the module does not import": (
        "import concurrent.futures\nimport xml.dom\nimport xml.dom.minidom\n"
        "def f(): return xml.dom.minidom.__name__, concurrent.futures.__name__",
        (),
    ),
    "names of the module": ("def f(): return __name__", ()),
    "a closure": ("def make(n):\n    def f(x): return n + x\n    return f\nf = make([1])", ([2],)),
    "an empty cell": (
        "def make():\n    def f(x):\n        try: return y\n        except NameError: return 'none'\n"
        "    return f\n    y = 1\nf = make()",
        (1,),
    ),
    "defaults": ("def f(a, b=2, *rest, c=[3], **more): return a, b, rest, c, more", (1,)),
    "recursion": ("def f(n): return 1 if n < 2 else n * f(n - 1)", (5,)),
    "recursion in a closure": ("def make():\n    def f(n): return n and n + f(n - 1)\n    return f\nf = make()", (4,)),
    "mutual recursion": ("def f(n): return n == 0 or g(n - 1)\ndef g(n): return n != 0 and f(n - 1)", (7,)),
    "callees with values": ("a = 1\ndef g(): return a + h()\ndef h(): return 10 * a\ndef f(): return g(), h(), a", ()),
    "callees that are the same": ("def g(): pass\ndef h(): return g\ndef f(): return g is h()", ()),
    "a decorator": (
        "import functools\ndef twice(g):\n    @functools.wraps(g)\n    def inner(*args): return 2 * g(*args)\n"
        "    return inner\n@twice\ndef f(x):\n    'Says so.'\n    return x + n\nn = 4",
        (1,),
    ),
    "two decorated in one way": (
        "def twice(g):\n    def inner(*args): return 2 * g(*args)\n    return inner\n"
        "@twice\ndef g(x): return x + 1\n@twice\ndef h(x): return x + 2\ndef f(x): return g(x), h(x)",
        (1,),
    ),
    "attributes": ("def f(): return f.count, f.other()\nf.count = [1]\ndef g(): return 5\nf.other = g", ()),
    "a lambda": ("n = 2\nf = lambda x, m=3: (x, n, m)", (1,)),
    "functions inside": ("n = 2\ndef f(xs): return [(lambda x: x * n)(x) for x in xs]", ([1, 2],)),
    "a class inside": ("def f():\n    class A:\n        def m(self): return n\n    return A().m()\nn = 8", ()),
    "a generator": ("n = 3\ndef f():\n    yield from range(n)", ()),
    "an async function": ("import asyncio\nn = 3\nasync def f():\n    await asyncio.sleep(0)\n    return n", ()),
    "annotations": ("def f(x: int, y: 'str' = 'a') -> float: return x", (1,)),
    "a global that is stored to": ("n = 0\ndef f():\n    global n, m\n    n += 1\n    m = n\n    return n, m", ()),
    "a global that is only stored to": (
        "def f():\n    global m\n    had = 'm' in globals()\n    m = 1\n    return had",
        (),
    ),
    "a global container that is changed": ("seen = []\ndef f(x):\n    seen.append(x)\n    return seen", (1,)),
    "a name that is not there": ("def f():\n    try: return missing\n    except NameError: return 'none'", ()),
    "a list of functions": ("def g(): return 1\nsteps = [g]\ndef f(): return steps[0]() , steps[0] is g", ()),
    "a class whose methods use a container": (
        "seen = {}\nclass A:\n    n = 1\n    def put(self, x): seen[x] = self.n\n"
        "def f(x):\n    A().put(x)\n    return seen",
        (1,),
    ),
    "super": (
        "class A:\n    def m(self): return 1\nclass B(A):\n    def m(self): return 1 + super().m()\n"
        "def f(): return B().m()",
        (),
    ),
    "slots": ("class A:\n    __slots__ = ('x',)\ndef f(x):\n    a = A()\n    a.x = x\n    return a.x", (1,)),
    "a dataclass": (
        "from dataclasses import dataclass\n@dataclass(frozen=True)\nclass P:\n    x: int\n    y: int = 2\n"
        "def f(x): return repr(P(x)), P(x) == P(1)",
        (1,),
    ),
    "an enum": (
        "from enum import Enum\nclass E(Enum):\n    A = 1\n    B = 2\ndef f(): return E.B.value, E(1).name",
        (),
    ),
    "a class with constants, callees and all kinds of methods": (
        "H = 3\ndef g(x): return x + H\nclass A:\n    k = [1]\n    n = 2\n"
        "    def m(self, x=H, *, y=1): return g(x) + y + len(self.k) + self.n\n"
        "    @property\n    def p(self): return self.m()\n"
        "    @classmethod\n    def c(cls): return cls.__name__, cls().p\n"
        "    @staticmethod\n    def s(): return H\n    class Inner:\n        z = 5\n"
        "def f(x): return A().m(x), A().p, A.c(), A.s(), A.Inner.z, g(1), H",
        (1,),
    ),
    "classes that name each other, and the function": (
        "class A:\n    def m(self, n): return n and B().m(n - 1)\nclass B:\n    a = A\n"
        "    def m(self, n): return ('f', f(0)) if n < 2 else A().m(n - 1)\n"
        "def f(n): return B.a is A, n and A().m(n)",
        (3,),
    ),
    "a dataclass with a factory, of a dataclass": (
        "from dataclasses import dataclass, field\n@dataclass\nclass P:\n    x: list = field(default_factory=list)\n"
        "@dataclass(order=True)\nclass Q:\n    p: P = field(default_factory=P)\n    y: float = 2.5\n"
        "def f(x):\n    q = Q()\n    q.p.x.append(x)\n    return repr(q), q == Q(), Q(P([1])) == q",
        (1,),
    ),
    "an abstract class": (
        "import abc\nclass A(abc.ABC):\n    @abc.abstractmethod\n    def m(self): ...\nclass B(A):\n"
        "    def m(self): return isinstance(self, A)\ndef f():\n    try: A()\n    except TypeError: return B().m()",
        (),
    ),
    "a module of torch": (
        "import torch\nN = 2\nclass Net(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.layer = torch.nn.Linear(N, 1, bias=False)\n"
        "    def forward(self, x): return self.layer(x).shape\ndef f(): return Net()(torch.ones(3, N))",
        (),
    ),
    "a function of autograd": (
        "import torch\nclass Twice(torch.autograd.Function):\n"
        "    @staticmethod\n    def forward(ctx, x): return 2 * x\n"
        "    @staticmethod\n    def backward(ctx, g): return 2 * g\n"
        "def f():\n    x = torch.ones(1, requires_grad=True)\n    Twice.apply(x).sum().backward()\n"
        "    return x.grad.item()",
        (),
    ),
    "an error": (
        "class E(ValueError): pass\ndef f():\n    try: raise E('x')\n    except E as error: return str(error)",
        (),
    ),
    "a generic class": (
        "from typing import Generic, TypeVar\nT = TypeVar('T')\nclass A(Generic[T]):\n"
        "    def m(self, x: T) -> T: return x\ndef f(): return A[int]().m(3)",
        (),
    ),
    "a named tuple": (
        "from typing import NamedTuple\nclass A(NamedTuple):\n    x: int = 1\ndef f(): return tuple(A())",
        (),
    ),
    "a decorated method": (
        "import torch\nclass A:\n    @torch.no_grad()\n    def m(self): return torch.is_grad_enabled()\n"
        "def f(): return A().m()",
        (),
    ),
    "functions in a mode of autograd": (
        "import torch\n@torch.no_grad()\ndef g(): return torch.is_grad_enabled(), n\nn = 3\n"
        "@torch.inference_mode()\ndef f(x): return x + 1, torch.is_inference_mode_enabled(), g()",
        (1,),
    ),
    "a method that is called": ("class A:\n    def m(self): return 3\nm = A().m\ndef f(): return m()", ()),
    "a metaclass": (
        "class M(type):\n    def size(cls): return len(cls.__name__)\nclass A(metaclass=M): pass\n"
        "def f(): return A.size()",
        (),
    ),
    "a method": ("class A:\n    n = 4\n    def m(self): return self.n\nf = A().m", ()),
}
WHOLE = {
    *("a list of functions", "a class whose methods use a container", "a named tuple", "a method"),
    *("a method that is called", "a namespace of functions"),
}


def run_program(source: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}
    exec(compile(textwrap.dedent(source), "<cell>", "exec"), names)
    return names


def arrived(function: Any) -> Any:
    """``function`` as its callee has it."""
    found = units.split(function) if isinstance(function, FunctionType) else None
    if found is None:
        return whole(function)
    segment, values = found
    loaded = units.LoadedUnit(units.content_of(segment[1 : 1 + DIGEST_BYTES]))
    if values is None:
        assert loaded.function is not None
        return loaded.function
    return loaded.make(copy.deepcopy(values))


def whole(function: Any) -> Any:
    return cloudpickle.loads(cloudpickle.dumps(function))


def outcome(function: Any, arguments: tuple[Any, ...]) -> Any:
    """What two calls of the function return, and what it is."""
    results = []
    for _ in range(2):
        result = function(*copy.deepcopy(arguments))
        if inspect.isgenerator(result):
            result = list(result)
        elif inspect.iscoroutine(result):
            result = asyncio.run(result)
        results.append(copy.deepcopy(result))
    names = ("__name__", "__qualname__", "__module__", "__doc__", "__annotations__", "__defaults__", "__kwdefaults__")
    return results, [getattr(function, name, None) for name in names]


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_function_behaves_as_after_cloudpickle(name: str) -> None:
    source, arguments = PROGRAMS[name]
    expected = outcome(whole(run_program(source)["f"]), arguments)
    function = run_program(source)["f"]  # anew: cloudpickle changes classes that it finds in its own process
    assert outcome(arrived(function), arguments) == expected
    if name not in WHOLE:
        assert units.split(function) is not None
        assert outcome(arrived(function), arguments) == expected  # the names are followed a second time


@st.composite
def programs(draw: st.DrawFn) -> str:
    """Functions that call each other, read globals, keep values in closures, defaults and attributes."""
    count = draw(st.integers(1, 5))
    lines = [f"v{number} = {draw(st.sampled_from(['1', '[1]', '{2: 3}', 'None', '(4, [5])']))}" for number in range(3)]
    lines.append(
        "def make(n, kept):\n    def f0(fuel, x=(1,)): return [n, kept, x, fuel and f0(fuel - 1)]\n    return f0"
    )
    lines.append(f"f0 = make({draw(st.integers())}, v{draw(st.integers(0, 2))})")
    for number in range(1, count + 1):
        uses = ", ".join(
            draw(
                st.sampled_from(
                    [f"v{one}" for one in range(3)] + [f"fuel and f{one}(fuel - 1)" for one in range(count + 1)]
                )
            )
            for _ in range(draw(st.integers(0, 3)))
        )
        default = draw(st.sampled_from(["", ", y=v0", ", *, y=[7]"]))
        lines.append(f"def f{number}(fuel{default}):\n    return [{number}, {uses}]")
        if draw(st.booleans()):
            lines.append(f"f{number}.mark = {draw(st.sampled_from(['v1', 'f0', f'f{number}', 'len']))}")
    lines.append(f"def f(fuel): return f{draw(st.integers(0, count))}(fuel), f{draw(st.integers(0, count))}(fuel)")
    return "\n".join(lines)


@given(programs(), st.integers(0, 3))
def test_any_functions_that_call_each_other(source: str, fuel: int) -> None:
    function = run_program(source)["f"]
    assert units.split(function) is not None
    assert outcome(arrived(function), (fuel,)) == outcome(whole(function), (fuel,))


def test_nothing_is_stale() -> None:
    names = run_program(
        "import math\nn = 1\nkept = [1]\ndef g(): return 'g'\ndef make(cell):\n"
        "    def f(x=0): return n, kept, g(), cell, x, math.__name__, len('ab')\n    return f\nf = make(5)"
    )
    function = names["f"]

    def look() -> Any:
        assert units.split(function) is not None
        result = arrived(function)()
        assert result == function()
        return result

    seen = [look()]
    for change in (
        "n = 2",
        "kept.append(2)",
        "kept = {}",
        "def g(): return 'h'",
        "old, g = g, lambda: 'i'",
        "g = old",
        "g.__code__ = (lambda: 'j').__code__",
        "f.__defaults__ = (9,)",
        "f.__closure__[0].cell_contents = [6]",
        "import cmath as math",
        "len = max",
        "def len(x): return 'own'",
        "del len",
    ):
        exec(change, names)
        seen.append(look())
    assert all(one != other for one, other in itertools.pairwise(seen))
    exec("n = old", names)
    assert arrived(function)()[0]() == "j"


def test_each_state_of_a_class_has_a_unit_of_its_own() -> None:
    """A peer that has the unit of an earlier state would leave its class as it is."""
    names = run_program(
        "H = 1\nclass Base:\n    def b(self): return 0\n"
        "class A(Base):\n    n = 1\n    k = [1]\n    def m(self, x=H): return x + H\n"
        "def f(): return A().m(), A.n, A.k\ndef g(): return A"
    )

    def look(name: str = "f") -> tuple[bytes, Any]:
        found = units.split(names[name])
        assert found is not None
        return found[0], copy.deepcopy(found[1])

    first = look()
    assert look() == first
    assert first[1] == [1, [1]]
    names["A"].n = 2
    names["A"].k.append(2)
    assert look() == (first[0], [2, [1, 2]])  # values: the code is the same
    seen = [first[0], look("g")[0]]
    for change in (
        "H = 2",
        "old = A.m\nA.m = lambda self: 5",
        "A.m = old",
        "A.m.__defaults__ = (7,)",
        "A.p = property(lambda self: 1)",
        "Base.b = lambda self: 9",
        "def g(): return A\nclass A(Base): pass",
    ):
        exec(change, names)
        seen.append(look("g" if "class A" in change else "f")[0])
    names["A"].m = lambda self: 1
    write_value(Frame(REQUEST), names["A"])  # whole
    del names["A"].m
    seen.append(look("g")[0])
    assert len(set(seen)) == len(seen)


def test_a_function_without_values_is_one_unit_for_all_its_copies() -> None:
    names = run_program("def make():\n    return lambda x: x + 1\ndef with_value(n):\n    return lambda x: x + n")
    first, second = (units.split(names["make"]()) for _ in range(2))
    assert first == second
    assert first is not None
    assert first[1] is None
    one, other = (units.split(names["with_value"](n)) for n in (1, 2))
    assert one is not None
    assert other is not None
    assert (one[0], one[1], other[1]) == (other[0], [1], [2])


def test_functions_of_one_call_share_their_globals_and_calls_share_none() -> None:
    function = run_program("n = 0\ndef g():\n    global n\n    n += 1\ndef f():\n    g()\n    g()\n    return n")["f"]
    found = units.split(function)
    assert found is not None
    assert found[1] == [0]
    unit = units.LoadedUnit(units.content_of(found[0][1 : 1 + DIGEST_BYTES]))
    assert unit.function is None
    assert [unit.make([0])(), unit.make([5])(), unit.make([0])()] == [2, 7, 2]


def test_a_unit_holds_no_values() -> None:
    secret = "a text that only the value has"
    names = run_program("def make(x):\n    def f(y=x): return x, kept, y\n    f.also = x\n    return f")
    names["kept"] = [secret, torch.ones(1000)]
    found = units.split(names["make"](secret))
    assert found is not None
    assert secret.encode() not in units.content_of(found[0][1 : 1 + DIGEST_BYTES])


def test_a_function_is_not_kept_alive() -> None:
    names = run_program("def make(x):\n    def g(): return x\n    def f(): return g()\n    return f")
    kept = torch.ones(10)
    function = names["make"](kept)
    assert units.split(function) is not None
    gone = weakref.ref(kept)
    del kept, function
    gc.collect()
    assert gone() is None


def test_a_unit_is_there_for_the_question_after_a_thousand_others_were_sent() -> None:
    segments = []
    for number in range(units._MOST_UNITS + 2):
        found = units.split(eval(f"lambda: {number}"))
        assert found is not None
        segments.append(found[0])
    assert all(units.content_of(segment[1 : 1 + DIGEST_BYTES]) for segment in segments)


def test_what_leads_elsewhere_at_every_call_travels_whole() -> None:
    names = run_program("import torch\ndef f(): return device.type")
    for number in range(units._MOST_TIMES + 2):
        names["device"] = torch.device("cpu", number)
        found = units.split(names["f"])
        assert (found is None) is (number > units._MOST_TIMES)
        assert arrived(names["f"])() == "cpu"


def test_modules_that_the_program_sends_by_value_go_whole() -> None:
    names = run_program("import textwrap\ndef f(x): return textwrap.dedent(x)")
    cloudpickle.register_pickle_by_value(textwrap)
    try:
        assert units.split(names["f"]) is None
    finally:
        cloudpickle.unregister_pickle_by_value(textwrap)
