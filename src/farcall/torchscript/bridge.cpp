// The operators by which TorchScript code issues calls and uses references, carried out by farcall.
//
// TorchScript compiles `rpc.rpc_sync`, `rref.to_here()` and their like into operators of torch's own, whose C++ talks
// to torch's own agent. This file puts others in their place, which call into Python: `farcall.torchscript.handlers`.
// It decides nothing itself. What it owns is the way of values between the two worlds:
//
//   a reference   farcall's RRef, a Python object  <->  Reference, which is what an IValue can hold
//   a future      farcall's Future                  ->  ivalue::Future of the type that the script was compiled with
//   a value       any Python object                <->  IValue, by the type that the script was compiled with
//
// Thread rules: operators run on any thread, without the interpreter lock, and take it for as long as they are in
// Python. Nothing here waits for an answer: Python does, in ways that let others run.
//
// An operator that was replaced is kept for good. Code that was compiled before holds a bare pointer to it; and when
// farcall is not in place any more, it is what ours hand on to.

#define USE_DISTRIBUTED
#define USE_RPC

#include <torch/csrc/distributed/autograd/context/container.h>
#include <torch/csrc/distributed/rpc/py_rref.h>
#include <torch/csrc/distributed/rpc/request_callback.h>
#include <torch/csrc/distributed/rpc/rpc_agent.h>
#include <torch/csrc/distributed/rpc/rref_context.h>
#include <torch/csrc/jit/frontend/script_type_parser.h>
#include <torch/csrc/jit/ir/ir.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/jit/runtime/operator.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/custom_class.h>

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace {

namespace py = pybind11;
namespace rpc = torch::distributed::rpc;
using c10::IValue;
using c10::TypePtr;
using torch::distributed::autograd::DistAutogradContainer;
using torch::jit::Node;
using torch::jit::Operation;
using torch::jit::Operator;
using torch::jit::Stack;
using torch::jit::toIValue;
using torch::jit::toPyObject;

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

// ------------------------------------------------------------------------------------------------ references

std::atomic<int64_t> next_number{1};

// farcall's RRef, as something that an IValue can hold.
class Reference final : public rpc::RRef {
 public:
  // With the interpreter lock held.
  Reference(py::object rref, TypePtr known_type, rpc::worker_id_t here, rpc::worker_id_t owner)
      : rpc::RRef(owner, rpc::RRefId(here, next_number++), c10::PyObjectType::get()),
        rref_(rref.release().ptr()),
        known_type_(std::move(known_type)),
        here_(here) {}

  ~Reference() override {
    if (Py_IsInitialized()) {
      py::gil_scoped_acquire gil;
      Py_DECREF(rref_);
    }
  }

  py::object python() const {
    return py::reinterpret_borrow<py::object>(rref_);
  }

  std::string ownerName() const override {
    py::gil_scoped_acquire gil;
    return ask<std::string>("owner_name");
  }

  bool isOwner() const override {
    py::gil_scoped_acquire gil;
    return ask<bool>("is_owner");
  }

  bool confirmedByOwner() const override {
    py::gil_scoped_acquire gil;
    return ask<bool>("confirmed_by_owner");
  }

  // Asked for where an attribute of a module is a reference; the owner may have to be asked, so only then.
  const TypePtr type() const override {
    py::gil_scoped_acquire gil;
    if (!known_type_) {
      try {
        py::object found = handler("type_of")(python());
        known_type_ = found.is_none() ? TypePtr(c10::PyObjectType::get()) : found.cast<TypePtr>();
      } catch (py::error_already_set& error) {
        throw std::runtime_error(text_of(error));
      }
    }
    return known_type_;
  }

 protected:
  // TorchScript writes this reference into a file. Who reads it asks this worker for the reference of that number.
  // Owner and parent are the same, so that torch finds nothing to tell anybody.
  rpc::RRefForkData fork() const override {
    const auto name = type()->annotation_str();
    py::gil_scoped_acquire gil;
    try {
      handler("keep_pickled")(rrefId().localId_, python());
    } catch (py::error_already_set& error) {
      throw std::runtime_error(text_of(error));
    }
    return rpc::RRefForkData(here_, rrefId(), rpc::ForkId(here_, next_number++), here_, name);
  }

 private:
  template <typename T>
  T ask(const char* method) const {
    try {
      return python().attr(method)().cast<T>();
    } catch (py::error_already_set& error) {
      throw std::runtime_error(text_of(error));
    }
  }

  PyObject* rref_;
  mutable TypePtr known_type_;
  const rpc::worker_id_t here_;
};

c10::intrusive_ptr<rpc::RRef> make_reference(const py::object& rref, TypePtr type) {
  auto numbers = handler("numbers_of")(rref).cast<std::pair<rpc::worker_id_t, rpc::worker_id_t>>();
  return c10::make_intrusive<Reference>(rref, std::move(type), numbers.first, numbers.second);
}

// farcall's RRef inside of a reference that TorchScript holds. With the interpreter lock held.
py::object python_of(const c10::intrusive_ptr<c10::RRefInterface>& held) {
  if (auto ours = c10::dynamic_intrusive_pointer_cast<Reference>(held)) {
    return ours->python();
  }
  // One that torch made when it read a file; see Reference::fork.
  auto theirs = c10::dynamic_intrusive_pointer_cast<rpc::RRef>(held);
  TORCH_CHECK(theirs, "this reference is of a kind that farcall does not know");
  return handler("find_pickled")(theirs->rrefId().createdOn_, theirs->rrefId().localId_);
}

// What pybind11 calls where torch wants its own PyRRef and finds another object.
PyObject* convert(PyObject* source, PyTypeObject*) {
  if (!enabled || reinterpret_cast<PyObject*>(Py_TYPE(source)) != handlers->reference_class.ptr()) {
    return nullptr;
  }
  try {
    auto rref = py::reinterpret_borrow<py::object>(source);
    return py::cast(rpc::PyRRef(make_reference(rref, nullptr))).release().ptr();
  } catch (py::error_already_set& error) {
    error.discard_as_unraisable("farcall: a reference on its way into TorchScript");
    return nullptr;
  }
}

// farcall's RRef inside of torch's PyRRef, which is what TorchScript gives to Python; None if it is torch's own.
py::object unwrap(py::handle wrapped) {
  if (!enabled) {
    return py::none();
  }
  return python_of(wrapped.cast<rpc::PyRRef&>().toIValue().toRRef());
}

// ------------------------------------------------------------------------------------------------ values

// A value that scripts may change in place, at the owner of a reference to it.
struct ScriptValue {
  IValue value;
};

// Lists, dicts and objects are copied on their way from Python, so a script would change its copy.
bool is_mutable(const TypePtr& type) {
  switch (type->kind()) {
    case c10::TypeKind::ListType:
    case c10::TypeKind::DictType:
      return true;
    case c10::TypeKind::ClassType:
      return !type->is_module();
    default:
      return false;
  }
}

bool contains_reference(const TypePtr& type) {
  if (type->kind() == c10::TypeKind::RRefType) {
    return true;
  }
  for (const auto& part : type->containedTypes()) {
    if (contains_reference(part)) {
      return true;
    }
  }
  return false;
}

// `value` with torch's objects in the place of farcall's references. `convert` does that by itself, but only below a
// call from Python into torch, which keeps what it makes; and TorchScript has threads of its own.
py::object with_references(const py::object& value) {
  if (value.get_type().is(handlers->reference_class)) {
    return py::cast(rpc::PyRRef(make_reference(value, nullptr)));
  }
  auto each = [](const py::handle& one) { return with_references(py::reinterpret_borrow<py::object>(one)); };
  if (py::isinstance<py::list>(value) || py::isinstance<py::tuple>(value)) {
    py::list items;
    for (auto one : value) {
      items.append(each(one));
    }
    return py::isinstance<py::list>(value) ? py::object(items) : py::object(py::tuple(items));
  }
  if (py::isinstance<py::dict>(value)) {
    py::dict items;
    for (auto one : value.cast<py::dict>()) {
      items[each(one.first)] = each(one.second);
    }
    return items;
  }
  return value;
}

IValue value_of(const py::object& value, const TypePtr& type) {
  if (py::isinstance<ScriptValue>(value)) {
    return value.cast<ScriptValue&>().value;
  }
  return toIValue(contains_reference(type) ? with_references(value) : value, type);
}

// The same for a value that Python made, of which nobody promised that it has the type that the script says: then the
// script has it as it is, as in torch.
IValue value_or_object(const py::object& value, const TypePtr& type) {
  try {
    return value_of(value, type);
  } catch (const py::error_already_set&) {
    throw;
  } catch (const std::exception&) {
    return toIValue(value, c10::PyObjectType::get());
  }
}

void complete(const c10::intrusive_ptr<c10::ivalue::Future>& future, const py::object& done, const TypePtr& type) {
  IValue value;
  std::exception_ptr error;
  try {
    value = value_of(done.attr("value")(), type);
  } catch (py::error_already_set& raised) {
    error = std::make_exception_ptr(std::runtime_error(text_of(raised)));
  } catch (const std::exception& raised) {
    error = std::make_exception_ptr(std::runtime_error(raised.what()));
  }
  py::gil_scoped_release without_gil;  // whoever waits goes on here
  if (error) {
    future->setError(error);
  } else {
    future->markCompleted(std::move(value));
  }
}

// ------------------------------------------------------------------------------------------------ operators

enum Which {
  RPC_SYNC,
  RPC_ASYNC,
  RPC_REMOTE,
  TO_HERE,
  LOCAL_VALUE,
  IS_OWNER,
  OWNER,
  OWNER_NAME,
  CONFIRMED_BY_OWNER,
  GET_GRADIENTS,
  BACKWARD,
  COUNT
};

constexpr std::array<const char*, COUNT> names = {
    "prim::rpc_sync",
    "prim::rpc_async",
    "prim::rpc_remote",
    "aten::to_here",
    "aten::local_value",
    "aten::is_owner",
    "aten::owner",
    "aten::owner_name",
    "aten::confirmed_by_owner",
    "aten::get_gradients",
    "aten::dist_backward",
};

std::array<std::shared_ptr<Operator>, COUNT> replaced;

struct Call {
  py::object to, name, args, kwargs, timeout, context;
};

Call take_call(Stack& stack, size_t count) {
  auto inputs = torch::jit::last(stack, count);
  Call call;
  call.to = inputs[0].isString() ? py::object(py::str(inputs[0].toStringRef()))
                                 : py::object(py::str(inputs[0].toCustomClass<rpc::WorkerInfo>()->name_));
  call.name = py::str(inputs[1].toStringRef());
  call.args = count > 2 ? toPyObject(inputs[2]) : py::object(py::tuple());
  call.kwargs = count > 3 ? toPyObject(inputs[3]) : py::object(py::dict());
  call.timeout = count > 4 ? toPyObject(inputs[4]) : py::object(py::float_(-1.0));
  call.context = py::int_(DistAutogradContainer::currentContextId());
  torch::jit::drop(stack, count);
  return call;
}

IValue issue(Which which, const Call& call, const TypePtr& type) {
  auto with = [&](const char* name) {
    return handler(name)(call.to, call.name, call.args, call.kwargs, call.timeout, call.context);
  };
  if (which == RPC_SYNC) {
    return value_of(with("call_sync"), type);
  }
  if (which == RPC_REMOTE) {
    auto rref = make_reference(with("call_remote"), type->expect<c10::RRefType>()->getElementType());
    return IValue(c10::static_intrusive_pointer_cast<c10::RRefInterface>(rref));
  }
  auto element = type->expect<c10::FutureType>()->getElementType();
  auto future = c10::make_intrusive<c10::ivalue::Future>(element);
  py::object pending = with("call_async");
  pending.attr("add_done_callback")(
      py::cpp_function([future, element](const py::object& done) { complete(future, done, element); }));
  return IValue(std::move(future));
}

IValue fetch(Which which, const py::object& rref, const py::object& timeout, const TypePtr& type) {
  auto found = which == TO_HERE ? handler("to_here")(rref, timeout, type->is_module()) : handler("local_value")(rref);
  auto value = value_or_object(found, type);
  if (is_mutable(type) && !value.isPyObject() && !py::isinstance<ScriptValue>(found)) {
    handler("keep_value")(rref, py::cast(ScriptValue{value}));
  }
  return value;
}

IValue use_reference(Which which, Stack& stack, size_t count, const TypePtr& type) {
  py::object timeout = count > 1 ? toPyObject(torch::jit::pop(stack)) : py::none();
  auto held = torch::jit::pop(stack).toRRef();
  auto rref = python_of(held);
  held.reset();
  switch (which) {
    case IS_OWNER:
      return IValue(rref.attr("is_owner")().cast<bool>());
    case OWNER_NAME:
      return IValue(rref.attr("owner_name")().cast<std::string>());
    case CONFIRMED_BY_OWNER:
      return IValue(rref.attr("confirmed_by_owner")().cast<bool>());
    case OWNER: {
      auto owner = rref.attr("owner")();
      return torch::make_custom_class<rpc::WorkerInfo>(
          owner.attr("name").cast<std::string>(), owner.attr("id").cast<int64_t>());
    }
    default:
      return fetch(which, rref, timeout, type);
  }
}

void use_gradients(Which which, Stack& stack, const TypePtr& type) {
  if (which == GET_GRADIENTS) {
    auto context = torch::jit::pop(stack);
    stack.push_back(toIValue(handler("get_gradients")(toPyObject(context)), type));
    return;
  }
  auto retain_graph = toPyObject(torch::jit::pop(stack));
  auto roots = toPyObject(torch::jit::pop(stack));
  auto context = toPyObject(torch::jit::pop(stack));
  handler("backward")(context, roots, retain_graph);
}

template <Which which>
void run(Stack& stack, size_t count, const TypePtr& type) {
  py::gil_scoped_acquire gil;
  try {
    if constexpr (which <= RPC_REMOTE) {
      auto call = take_call(stack, count);
      stack.push_back(issue(which, call, type));
    } else if constexpr (which < GET_GRADIENTS) {
      stack.push_back(use_reference(which, stack, count, type));
    } else {
      use_gradients(which, stack, type);
    }
  } catch (py::error_already_set& error) {
    throw std::runtime_error(text_of(error));
  }
}

template <Which which>
Operation create(const Node* node) {
  const size_t count = node->inputs().size();
  const TypePtr type = node->outputs().empty() ? TypePtr(c10::NoneType::get()) : node->output()->type();
  Operation theirs = replaced[which]->getOperation(node);
  return [=](Stack& stack) mutable {
    if (enabled) {
      run<which>(stack, count, type);
    } else {
      theirs(stack);
    }
  };
}

template <Which which>
void replace() {
  auto symbol = c10::Symbol::fromQualString(names[which]);
  auto found = torch::jit::getAllOperatorsFor(symbol);  // a copy: what it holds must outlive the registry's own
  TORCH_CHECK(found.size() == 1, names[which], " has ", found.size(), " forms in this torch; farcall knows one");
  replaced[which] = found[0];
  auto aliasing = found[0]->aliasAnalysisKind();
  auto schema = found[0]->schema();
  torch::jit::deregisterOperator(schema);
  if (schema.is_vararg()) {
    torch::jit::registerOperator(Operator(symbol, create<which>, aliasing));
  } else {
    torch::jit::registerOperator(Operator(c10::toString(schema), create<which>, aliasing));
  }
}

void replace_all() {
  replace<RPC_SYNC>();
  replace<RPC_ASYNC>();
  replace<RPC_REMOTE>();
  replace<TO_HERE>();
  replace<LOCAL_VALUE>();
  replace<IS_OWNER>();
  replace<OWNER>();
  replace<OWNER_NAME>();
  replace<CONFIRMED_BY_OWNER>();
  replace<GET_GRADIENTS>();
  replace<BACKWARD>();
}

// ------------------------------------------------------------------------------------------------ references in files

// torch asks its agent who it is when TorchScript writes or reads a reference, and tells it when one dies. This one
// has nobody to tell.
class SilentAgent final : public rpc::RpcAgent {
 public:
  SilentAgent() : rpc::RpcAgent(rpc::WorkerInfo("farcall", int64_t{32767}), nullptr, std::chrono::milliseconds(0)) {}
  ~SilentAgent() override = default;

  c10::intrusive_ptr<rpc::JitFuture> send(
      const rpc::WorkerInfo&, c10::intrusive_ptr<rpc::Message>, const float, const rpc::DeviceMap&) override {
    auto done = c10::make_intrusive<rpc::JitFuture>(c10::AnyType::get());
    done->markCompleted(IValue());
    return done;
  }
  const rpc::WorkerInfo& getWorkerInfo(const std::string&) const override {
    return workerInfo_;
  }
  const rpc::WorkerInfo& getWorkerInfo(rpc::worker_id_t) const override {
    return workerInfo_;
  }
  std::vector<rpc::WorkerInfo> getWorkerInfos() const override {
    return {workerInfo_};
  }
  void join(bool, float) override {}
  void sync() override {}
  void startImpl() override {}
  void shutdownImpl() override {}
  std::unordered_map<std::string, std::string> getMetrics() override {
    return {};
  }

 private:
  void addGilWaitTime(const std::chrono::microseconds) override {}
};

void allow_pickling(bool allowed) {
  if (allowed) {
    rpc::enableJitRRefPickle();
  } else {
    rpc::disableJitRRefPickle();
  }
}

// ------------------------------------------------------------------------------------------------ for Python

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
  py::gil_scoped_release without_gil;
  future->fut->markCompleted(std::move(converted));
}

py::object enable(py::object module, py::object reference_class) {
  static const bool once = [] {
    auto* info = py::detail::get_type_info(typeid(rpc::PyRRef));
    TORCH_CHECK(info, "this torch has no RRef");
    info->implicit_conversions.push_back(convert);
    replace_all();
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

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  py::class_<ScriptValue>(m, "ScriptValue").def("to_python", [](const ScriptValue& held) {
    return toPyObject(held.value);
  });
  m.def("enable", &enable);
  m.def("disable", &disable);
  m.def("unwrap", &unwrap);
  m.def("parse_type", &parse_type);
  m.def("set_result", &set_result);
  m.def("allow_pickling", &allow_pickling);
  m.def("enter_context", [](int64_t id) { DistAutogradContainer::forceCurrentContextId(id); });
}
