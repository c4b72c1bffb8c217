// The operators by which TorchScript code issues calls and uses references, carried out by farcall.
//
// TorchScript compiles `rpc.rpc_sync`, `rref.to_here()` and their like into operators of torch's own, whose C++ talks
// to torch's own agent. This extension puts others in their place, which call into Python:
// `farcall.torchscript.handlers`. It decides nothing itself. What it owns is the way of values between the two worlds:
//
//   references.h  a reference   farcall's RRef, a Python object  <->  Reference, which is what an IValue can hold
//   values.h      a future      farcall's Future                  ->  ivalue::Future of the type in the script
//                 a value       any Python object                <->  IValue, by the type in the script
//   operators.h   the operators, and how they replace torch's
//   files.h       references that TorchScript writes into files
//   handlers.h    what is called in Python, and its errors
//
// Thread rules: operators run on any thread, without the interpreter lock, and take it for as long as they are in
// Python. Nothing here waits for an answer: Python does, in ways that let others run.

#define USE_DISTRIBUTED
#define USE_RPC

#include "files.h"
#include "operators.h"

#include <torch/csrc/jit/frontend/script_type_parser.h>

namespace {

struct ScriptNames final : public torch::jit::Resolver {
  TypePtr resolveType(const std::string& name, const torch::jit::SourceRange&) override {
    return torch::jit::get_python_cu()->get_type(c10::QualifiedName(name));
  }
};

TypePtr parse_type(const std::string& text) {
  return torch::jit::ScriptTypeParser(std::make_shared<ScriptNames>()).parseType(text);
}

void set_result(const std::shared_ptr<torch::jit::PythonFutureWrapper>& future, const py::object& value, TypePtr type) {
  IValue converted = value_of(value, type);
  OutOfPython here;
  future->fut->markCompleted(std::move(converted));
}

py::object enable(py::object module, py::object reference_class) {
  static const bool once = [] {
    auto* info = py::detail::get_type_info(typeid(rpc::PyRRef));
    TORCH_CHECK(info, "this torch has no RRef");
    replace_all();
    info->implicit_conversions.push_back(convert);
    py::register_exception_translator(raise_interrupt);
    return true;
  }();
  (void)once;
  handlers = new Handlers{std::move(module), std::move(reference_class)};
  if (!rpc::RpcAgent::isCurrentRpcAgentSet()) {
    rpc::RpcAgent::setCurrentRpcAgent(std::make_shared<SilentAgent>());
  }
  enabled = true;
  return py::reinterpret_borrow<py::object>(py::detail::get_type_handle(typeid(rpc::PyRRef), true));
}

void disable() {
  enabled = false;
  if (rpc::RpcAgent::isCurrentRpcAgentSet() &&
      dynamic_cast<SilentAgent*>(rpc::RpcAgent::getCurrentRpcAgent().get()) != nullptr) {
    rpc::RpcAgent::setCurrentRpcAgent(nullptr);
  }
}

}  // namespace

PYBIND11_MODULE(farcall_torchscript, m) {
  py::class_<ScriptValue>(m, "ScriptValue").def("to_python", [](const ScriptValue& held) {
    return toPyObject(held.value);
  });
  m.def("enable", &enable);
  m.def("disable", &disable);
  m.def("shut", &shut);
  m.def("unwrap", &unwrap);
  m.def("parse_type", &parse_type);
  m.def("set_result", &set_result);
  m.def("allow_pickling", &allow_pickling);
  m.def("enter_context", [](int64_t id) { DistAutogradContainer::forceCurrentContextId(id); });
}
