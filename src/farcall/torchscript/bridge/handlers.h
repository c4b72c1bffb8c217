// The Python side of the bridge: the module whose functions carry out the operators, and errors that come from there.
//
// This and the headers beside it are parts of one translation unit, bridge.cpp: nearly all of the time that a build
// takes goes into torch's headers, which are read once that way.

#pragma once

#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <exception>
#include <stdexcept>
#include <string>
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

// Whoever asks for the interpreter lock now never gets it, and the process would abort.
bool interpreter_ends() {
#if PY_VERSION_HEX >= 0x030D0000
  return !Py_IsInitialized() || Py_IsFinalizing();
#else
  return !Py_IsInitialized() || _Py_IsFinalizing();
#endif
}

}  // namespace
