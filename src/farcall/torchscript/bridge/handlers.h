// The Python side of the bridge: the module whose functions carry out the operators, and errors that come from there.
//
// This and the headers beside it are parts of one translation unit, bridge.cpp: nearly all of the time that a build
// takes goes into torch's headers, which are read once that way.

#pragma once

#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <chrono>
#include <exception>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

namespace {

namespace py = pybind11;

// What Python gave us. Never freed: an operator may run while the interpreter is taken down.
struct Handlers {
  py::object module;
  py::object reference_class;
};
Handlers* handlers = nullptr;
std::atomic<bool> enabled{false};

py::object handler(const char* name) {
  return handlers->module.attr(name);
}

// The text of a Python error, as an error that TorchScript can carry. With the interpreter lock held.
std::string text_of(const py::error_already_set& error) {
  std::string text = py::str(error.value());
  if (PyErr_GivenExceptionMatches(error.value().ptr(), PyExc_RuntimeError)) {
    return text;
  }
  std::string kind = py::str(py::type::handle_of(error.value()).attr("__name__"));
  return kind + ": " + text;
}

// Ctrl-C. TorchScript makes a RuntimeError of every std::exception, and so would lose it; this it lets pass.
struct Interrupt {};

// What pybind11 does with what came out of a call from Python.
void raise_interrupt(std::exception_ptr thrown) {
  try {
    std::rethrow_exception(std::move(thrown));
  } catch (const Interrupt&) {
    PyErr_SetNone(PyExc_KeyboardInterrupt);
  }
}

// Ends an operator with the error that Python raised. With the interpreter lock held.
[[noreturn]] void fail(const py::error_already_set& error) {
  if (error.matches(PyExc_KeyboardInterrupt)) {
    auto threading = py::module_::import("threading");
    if (threading.attr("current_thread")().is(threading.attr("main_thread")())) {
      throw Interrupt();  // not on another one, where nobody might be that lets it pass
    }
  }
  throw std::runtime_error(text_of(error));
}

// Threads that are inside of Python on behalf of a script, or in a script on behalf of Python. Python unwinds such a
// thread when the interpreter ends, through C++ code that does not allow it, and the process aborts: so from `shut`
// on nobody comes in, and the process waits for those who are.
std::atomic<int> inside{0};
std::atomic<bool> closed{false};

bool enter() {
  ++inside;  // before the look at `closed`, as `shut` sets that before it looks here
  if (!closed) {
    return true;
  }
  --inside;
  return false;
}

class Entry {
 public:
  Entry() {
    if (!enter()) {
      throw std::runtime_error("the process is about to end");
    }
  }
  ~Entry() {
    --inside;
  }
  Entry(const Entry&) = delete;
  Entry& operator=(const Entry&) = delete;
};

// The interpreter lock, for a thread of a script.
struct InPython {
  Entry entry;  // first, so that it ends last
  py::gil_scoped_acquire gil;
};

// The other way round: a thread of Python's that goes on in a script, without the interpreter lock. After `shut` it
// keeps the lock: a script that waits must still hear of its result, or the process would wait for the script.
class OutOfPython {
 public:
  OutOfPython() : entered_(enter()) {
    if (entered_) {
      without_gil_.emplace();
    }
  }
  ~OutOfPython() {
    without_gil_.reset();
    if (entered_) {
      --inside;
    }
  }
  OutOfPython(const OutOfPython&) = delete;
  OutOfPython& operator=(const OutOfPython&) = delete;

 private:
  const bool entered_;
  std::optional<py::gil_scoped_release> without_gil_;
};

// Lets nobody in any more, and waits until all are out; at most that long.
void shut(double seconds) {
  using clock = std::chrono::steady_clock;
  closed = true;
  py::gil_scoped_release without_gil;
  const auto deadline = clock::now() + std::chrono::duration<double>(seconds);
  while (inside > 0 && clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

}  // namespace
